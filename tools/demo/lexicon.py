"""The words of the demo corpus. Every name is invented; mail domains use the reserved suffix ``example``."""


def _words(text: str) -> list[str]:
    return text.split()


FIRST_NAMES = _words("""
Ada Ana Anton Amira Bela Bruno Carla Chidi Clara Daniel Dina Edith Elif Emil Erik Farah Felix Gita Greta Hana Hugo Ida
Imran Ines Ivan Jana Jonas Kaito Karin Kofi Lara Leo Lena Lucía Maja Marco Mei Milan Mona Nadia Nils Nora Olga Omar
Otto Paula Pedro Petra Priya Rafael Ravi Rosa Ruth Samir Selma Signe Søren Tara Theo Tomas Uma Vera Viktor Wanda Yara
Yusuf Zoë Zuzana
""")

LAST_NAMES = _words("""
Abara Adler Almeida Anders Bakker Barros Becker Berg Bianchi Brandt Calder Castro Chen Conti Costa Dahl Demir Dubois
Eklund Farkas Ferrari Fischer Fonseca Garcia Greco Haas Hansen Holm Horvat Ito Jansen Jovanov Kaplan Keller Kim Klein
Kovac Kowalski Larsen Lindqvist Lopez Madsen Marino Meyer Mori Moreau Müller Nagy Ndiaye Novak Okafor Olsen Ortiz
Osman Pereira Petrov Popa Rao Ricci Rossi Sato Schmidt Silva Singh Sousa Tanaka Toth Vargas Vogel Wagner Weber Wolf
Yamada Zeman Zhang
""")

MATERIALS = _words("""
brass steel copper oak pine maple cotton linen rubber ceramic glass leather bamboo slate cork felt walnut silver
plastic nylon marble wool titanium paper
""")

# Singular and plural.
ARTICLES = [
    (word, plural or word + "s")
    for word, plural in (
        entry.partition("/")[::2]
        for entry in _words("""
        hinge bolt hook bracket handle tray lamp shelf/shelves stool bowl mug plate brush/brushes box/boxes basket
        ruler clamp valve pipe tile panel frame clock candle cushion blanket apron ladder bucket funnel washer spring
        bench/benches knife/knives vase chain screw rack mat
        """)
    )
]

COMPANIES = _words("""
Brightpath Corvane Halden Marlowe Nordhaus Ostrava Pellworm Quillon Ravenna Solvik Tarnby Umbria Verdant Westmark
Yarrow Zephyr Alderway Bluefin Cinderford Dunmore Eastgate Fernhill Glenmore Harbourne
""")

CITIES = _words("""
Oslo Porto Gdansk Lyon Turin Ghent Malmö Tallinn Riga Graz Zagreb Seville Bergen Leipzig Utrecht Cork Basel Trieste
Brno Split Nantes Bilbao Aarhus Turku Vilnius Genoa Bremen Lille Faro Patras
""")

CARRIERS = ["Northline", "Kestrel Freight", "Bluewater", "Parcelwise", "Red Arrow"]

DEPARTMENTS = ["billing", "sales", "support", "engineering", "logistics"]

SUBJECTS = [
    "roof inspection", "dental check-up", "budget review", "boiler service", "eye test", "job interview",
    "site visit", "contract signing", "piano lesson", "design review", "tax advice", "car service",
    "kitchen fitting", "passport renewal", "team planning", "safety briefing", "portfolio review", "blood test",
    "language exam", "garden survey", "lease renewal", "product demo", "hearing test", "course registration",
]  # fmt: skip

CURRENCIES = [("EUR", "€", "euros"), ("USD", "$", "dollars"), ("GBP", "£", "pounds")]

NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")

GREETINGS = [
    "Hello,", "Hi there,", "Good morning,", "Good afternoon,", "Dear team,", "Hi,", "Quick note:", "For the record:",
    "As discussed,", "Message from the front desk:", "Forwarded from voicemail:",
]  # fmt: skip

# Sentences that carry nothing for the record; "{n}" becomes a number that must not be picked up.
ASIDES = [
    "Ticket {n} can be closed.", "The lift in building {n} is out of order again.", "Thanks in advance.",
    "Sorry for the late message.", "Last month's invoice {n} is already paid.", "Please confirm when this is done.",
    "The weather has been dreadful all week.", "Room {n} is free for lunch, by the way.", "Let me know if it works.",
    "My colleague mentioned this on the train.", "There is no rush.", "We spoke about it in spring.",
    "Form {n} is attached for reference.", "The coffee machine still leaks.", "I will be away until the weekend.",
    "Nobody answered extension {n} today.", "Nothing else has changed.", "Kind regards from the workshop.",
    "Page {n} of the catalogue has a picture.", "The previous note of mine can be ignored.",
]  # fmt: skip
