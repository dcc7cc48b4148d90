"""The steps of a recipe: each can check itself before anything runs (`validate`) and do its work (`run`)."""
