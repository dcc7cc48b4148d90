"""The demo's text: our own sentences, written from templates in six languages.

Every template exists in every language. A document is a few sentences about one day of one person. The fillers vary,
which gives enough text to train a tiny model, and held-out documents use combinations that training never saw.
"""

import random

OLD = ("en", "es", "de")
NEW = ("el", "hu", "tr")

_NAMES = {
    "en": ("Anna", "Peter", "Maria", "David", "Helen", "George", "Sofia", "Martin"),
    "es": ("Ana", "Pedro", "María", "David", "Elena", "Jorge", "Sofía", "Martín"),
    "de": ("Anna", "Peter", "Maria", "David", "Helene", "Georg", "Sophie", "Martin"),
    "el": ("Άννα", "Ειρήνη", "Μαρία", "Δανάη", "Ελένη", "Κατερίνα", "Σοφία", "Μαρίνα"),
    "hu": ("Anna", "Péter", "Mária", "Dávid", "Ilona", "György", "Zsófia", "Márton"),
    "tr": ("Ayşe", "Mehmet", "Meryem", "Davut", "Elif", "Yusuf", "Zeynep", "Murat"),
}
_TIMES = {
    "en": ("in the morning", "at noon", "in the evening", "at night", "on Monday", "on Friday"),
    "es": ("por la mañana", "al mediodía", "por la tarde", "por la noche", "el lunes", "el viernes"),
    "de": ("am Morgen", "am Mittag", "am Abend", "in der Nacht", "am Montag", "am Freitag"),
    "el": ("το πρωί", "το μεσημέρι", "το βράδυ", "τη νύχτα", "τη Δευτέρα", "την Παρασκευή"),
    "hu": ("reggel", "délben", "este", "éjjel", "hétfőn", "pénteken"),
    "tr": ("sabahleyin", "öğlen", "akşamleyin", "geceleyin", "pazartesi günü", "cuma günü"),
}
_GOODS = {
    "en": ("bread", "milk", "cheese", "fish", "apples", "coffee", "honey", "rice"),
    "es": ("pan", "leche", "queso", "pescado", "manzanas", "café", "miel", "arroz"),
    "de": ("Brot", "Milch", "Käse", "Fisch", "Äpfel", "Kaffee", "Honig", "Reis"),
    "el": ("ψωμί", "γάλα", "τυρί", "ψάρι", "μήλα", "καφέ", "μέλι", "ρύζι"),
    "hu": ("kenyeret", "tejet", "sajtot", "halat", "almát", "kávét", "mézet", "rizst"),
    "tr": ("ekmek", "süt", "peynir", "balık", "elma", "kahve", "bal", "pirinç"),
}
_PLACES = {
    "en": ("to the market", "to school", "to the village", "to the sea", "to the station", "to the library"),
    "es": ("al mercado", "a la escuela", "al pueblo", "al mar", "a la estación", "a la biblioteca"),
    "de": ("zum Markt", "zur Schule", "ins Dorf", "ans Meer", "zum Bahnhof", "zur Bibliothek"),
    "el": ("στην αγορά", "στο σχολείο", "στο χωριό", "στη θάλασσα", "στον σταθμό", "στη βιβλιοθήκη"),
    "hu": ("a piacra", "az iskolába", "a faluba", "a tengerhez", "az állomásra", "a könyvtárba"),
    "tr": ("pazara", "okula", "köye", "denize", "istasyona", "kütüphaneye"),
}
_WEATHER = {
    "en": ("The sun is shining.", "It is raining.", "It is snowing.", "The wind is cold.", "The sky is clear."),
    "es": ("Brilla el sol.", "Está lloviendo.", "Está nevando.", "El viento es frío.", "El cielo está despejado."),
    "de": ("Die Sonne scheint.", "Es regnet.", "Es schneit.", "Der Wind ist kalt.", "Der Himmel ist klar."),
    "el": ("Ο ήλιος λάμπει.", "Βρέχει.", "Χιονίζει.", "Ο άνεμος είναι κρύος.", "Ο ουρανός είναι καθαρός."),
    "hu": ("Süt a nap.", "Esik az eső.", "Havazik.", "A szél hideg.", "Az ég tiszta."),
    "tr": ("Güneş parlıyor.", "Yağmur yağıyor.", "Kar yağıyor.", "Rüzgâr soğuk.", "Gökyüzü açık."),
}
_SENTENCES = {
    "en": (
        "{name} goes {place} {time}.",
        "{name} buys {good} and {good2}.",
        "{name} would like to eat {good}, but there is only {good2}.",
        "{time_cap} {name} reads a book and drinks tea.",
        "{name} and {name2} are good friends.",
        "The road {place} is long, but {name} knows a shorter way.",
        "{name2} asks: where can one buy {good}?",
        "{name} writes a letter to {name2} {time}.",
        "If it rains, {name} stays at home and cooks {good}.",
        "The children play in the garden while {name} works.",
        "{name} has two cats and an old dog.",
        "{name2} tells a story that everybody likes.",
    ),
    "es": (
        "{name} va {place} {time}.",
        "{name} compra {good} y {good2}.",
        "{name} quisiera comer {good}, pero solo hay {good2}.",
        "{time_cap} {name} lee un libro y bebe té.",
        "{name} y {name2} son buenos amigos.",
        "El camino {place} es largo, pero {name} conoce uno más corto.",
        "{name2} pregunta: ¿dónde se puede comprar {good}?",
        "{name} escribe una carta a {name2} {time}.",
        "Si llueve, {name} se queda en casa y cocina {good}.",
        "Los niños juegan en el jardín mientras {name} trabaja.",
        "{name} tiene dos gatos y un perro viejo.",
        "{name2} cuenta una historia que gusta a todos.",
    ),
    "de": (
        "{name} geht {time} {place}.",
        "{name} kauft {good} und {good2}.",
        "{name} möchte {good} essen, aber es gibt nur {good2}.",
        "{time_cap} liest {name} ein Buch und trinkt Tee.",
        "{name} und {name2} sind gute Freunde.",
        "Der Weg {place} ist lang, aber {name} kennt einen kürzeren.",
        "{name2} fragt: Wo kann man {good} kaufen?",
        "{name} schreibt {time} einen Brief an {name2}.",
        "Wenn es regnet, bleibt {name} zu Hause und kocht {good}.",
        "Die Kinder spielen im Garten, während {name} arbeitet.",
        "{name} hat zwei Katzen und einen alten Hund.",
        "{name2} erzählt eine Geschichte, die allen gefällt.",
    ),
    "el": (
        "Η {name} πηγαίνει {place} {time}.",
        "Η {name} αγοράζει {good} και {good2}.",
        "Η {name} θα ήθελε να φάει {good}, αλλά υπάρχει μόνο {good2}.",
        "{time_cap} η {name} διαβάζει ένα βιβλίο και πίνει τσάι.",
        "Η {name} και η {name2} είναι καλές φίλες.",
        "Ο δρόμος {place} είναι μακρύς, αλλά η {name} ξέρει έναν πιο σύντομο.",
        "Η {name2} ρωτάει: πού μπορεί κανείς να αγοράσει {good};",
        "Η {name} γράφει ένα γράμμα στην {name2} {time}.",
        "Αν βρέχει, η {name} μένει στο σπίτι και μαγειρεύει {good}.",
        "Τα παιδιά παίζουν στον κήπο ενώ η {name} δουλεύει.",
        "Η {name} έχει δύο γάτες και έναν γέρικο σκύλο.",
        "Η {name2} λέει μια ιστορία που αρέσει σε όλους.",
    ),
    "hu": (
        "{name} {time} {place} megy.",
        "{name} {good} és {good2} vesz.",
        "{name} {good} szeretne enni, de csak {good2} talál.",
        "{time_cap} {name} könyvet olvas és teát iszik.",
        "{name} és {name2} jó barátok.",
        "Az út {place} hosszú, de {name} ismer egy rövidebbet.",
        "{name2} megkérdezi: hol lehet {good} venni?",
        "{name} {time} levelet ír neki, és {name2} válaszol.",
        "Ha esik az eső, {name} otthon marad és {good} főz.",
        "A gyerekek a kertben játszanak, amíg {name} dolgozik.",
        "{name} két macskát és egy öreg kutyát tart.",
        "{name2} olyan történetet mesél, amely mindenkinek tetszik.",
    ),
    "tr": (
        "{name} {time} {place} gidiyor.",
        "{name} {good} ve {good2} alıyor.",
        "{name} {good} yemek istiyor ama yalnızca {good2} var.",
        "{time_cap} {name} kitap okuyor ve çay içiyor.",
        "{name} ile {name2} iyi arkadaştır.",
        "Yol {place} kadar uzun, ama {name} daha kısa bir yol biliyor.",
        "{name2} soruyor: nereden {good} alınabilir?",
        "{name} {time} bir mektup yazıyor ve {name2} cevap veriyor.",
        "Yağmur yağarsa {name} evde kalıyor ve {good} pişiriyor.",
        "{name} çalışırken çocuklar bahçede oynuyor.",
        "{name} iki kedi ve yaşlı bir köpek besliyor.",
        "{name2} herkesin sevdiği bir hikâye anlatıyor.",
    ),
}  # fmt: skip


def documents(language: str, count: int, seed: int) -> list[str]:
    """`count` documents of six sentences, drawn with `seed`."""
    draw = random.Random(f"{language}-{seed}")
    texts = []
    for _ in range(count):
        sentences = [draw.choice(_WEATHER[language])]
        name, name2 = draw.sample(_NAMES[language], 2)
        for template in draw.sample(_SENTENCES[language], 5):
            good, good2 = draw.sample(_GOODS[language], 2)
            time = draw.choice(_TIMES[language])
            time_cap, place = time[0].upper() + time[1:], draw.choice(_PLACES[language])
            sentences.append(
                template.format(
                    name=name, name2=name2, good=good, good2=good2, time=time, time_cap=time_cap, place=place
                )
            )
        texts.append(" ".join(sentences))
    return texts
