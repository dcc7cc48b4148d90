"""The steps of a recipe: each checks itself before anything runs (`validate`) and does its work (`run`)."""
