"""The word lists that the made-up conversations draw from.

Plain data. A change here changes the training text, and so the tokenizer and the model.
"""

from __future__ import annotations


def words_in(text: str) -> list[str]:
    """The words of a block of text."""
    return text.split()


def phrases_in(text: str) -> list[str]:
    """The phrases of a block of text, which are separated by bars."""
    return [" ".join(phrase.split()) for phrase in text.split("|")]


NOUNS = words_in(
    """
    apple pear plum lemon cherry grape melon banana peach orange carrot potato onion tomato bread cheese butter
    honey sugar salt water coffee tea milk juice table chair lamp door window box bag cup plate spoon knife fork
    bottle book pen paper letter phone clock watch key lock coin ring hat coat shoe shirt glove rope wheel car bike
    train boat plane ship bus truck road bridge house tower castle garden tree flower leaf stone river lake hill
    forest island beach desert moon sun star cloud rain snow wind fire drum piano guitar violin flute ball kite doll
    robot engine hammer nail saw brush mirror pillow blanket candle basket bucket ladder fence gate barn farm field
    market school office library museum hotel tiger lion bear wolf fox rabbit mouse frog duck goose eagle owl snake
    turtle shark whale camel zebra monkey panda
    """
)

COLORS = words_in(
    """
    red blue green yellow black white brown pink purple gray gold silver
    """
)

NAMES = words_in(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tom Vera Will Zoe
    Alice Bob Carol Dan Eva Frank Gina Hugo Iris John Kim Lucy Max Nina Oscar Peter Ruth Sara Tim Uma Victor Wendy
    Alex Maria Luca Nora Omar Ravi Yuki Chen Ali Jane Mark Lisa
    """
)

CITIES = words_in(
    """
    Paris Rome Berlin London Madrid Vienna Oslo Tokyo Cairo Lima Delhi Boston Dublin Prague Lisbon Athens Seoul
    Toronto Sydney Chicago Geneva Milan Havana Nairobi Denver Zurich
    """
)

PET_NAMES = words_in(
    """
    Momo Luna Rex Bella Coco Max Milo Nala Pip Rocky Simba Toby Kiki Lola Buddy Daisy Oreo Ziggy Pepper Ginger Felix
    Bruno Tiger Snowy
    """
)

PETS = words_in(
    """
    cat dog horse bird fish hamster rabbit parrot turtle brother sister friend teacher neighbor boat
    """
)

ADJECTIVES = words_in(
    """
    old small big red quiet happy slow quick young tall dark bright warm cold gentle clever lazy busy tired green
    heavy soft
    """
)

ANIMALS = words_in(
    """
    dog cat bird horse fox man woman child farmer teacher sailor king queen girl boy cow sheep bee
    """
)

VERBS = words_in(
    """
    walked ran looked went came jumped sat waited slept danced moved turned stayed played worked
    """
)

PREPOSITIONS = words_in(
    """
    to near behind under beside past toward around over by
    """
)

PLACES = words_in(
    """
    river house hill garden tree bridge road forest lake market school wall field tower barn door shop station park
    sea
    """
)

TIMES = phrases_in(
    """
    in the morning | at night | after lunch | before dinner | on Monday | in the summer | every day | in the rain |
    at noon | in the evening | last week | for an hour
    """
)

DAYS = words_in(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)

MONTHS = words_in(
    """
    January February March April May June July August September October November December
    """
)

LETTERS = list("abcdefghijklmnopqrstuvwxyz")
ORDINALS = words_in(
    """
    first second third fourth fifth sixth
    """
)

# What a fact may be about, and which kind of value it holds: "The <attribute> of <key> is <value>."
ATTRIBUTES = {
    "code": "code",
    "number": "number",
    "price": "number",
    "age": "number",
    "key": "code",
    "color": "color",
    "owner": "name",
    "name": "name",
    "place": "city",
    "city": "city",
    "friend": "name",
    "partner": "noun",
    "size": "number",
    "capital": "city",
    "password": "mixed",
    "symbol": "noun",
}
# Facts without a key: "The <thing> is <value>."
THINGS = {
    "password": "mixed",
    "secret word": "noun",
    "secret number": "number",
    "magic word": "noun",
    "code": "code",
    "secret code": "code",
    "pin": "code",
    "answer": "number",
    "meeting place": "city",
    "winner": "name",
}

# Made-up words are strung together from these.
SYLLABLES = words_in(
    """
    ba be bi bo bu ca co da de di do du fa fe fi fo ga go gra ha he hi ja jo ka ke ki ko la le li lo lu ma me mi mo
    na ne ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tra tri va ve vi vo wa wi ya yo za zo sh ch
    th st ng nd rt lm er an on in
    """
)

# What people might ask about that the model knows nothing of, and how they might ask.
TOPICS = phrases_in(
    """
    France | Germany | the ocean | quantum physics | black holes | the stock market | football | chess |
    Shakespeare | Mozart | the Roman Empire | dinosaurs | photosynthesis | democracy | a volcano |
    the moon landing | electric cars | Python | JavaScript | Linux | machine learning | a neural network | cancer |
    vitamins | pasta | sushi | chocolate cake | the weather | tomorrow | love | happiness | history | the universe |
    time | money | gravity | a hurricane | the Nile | Mount Everest | Napoleon | Einstein | Picasso | the Beatles |
    jazz | opera | ballet | cricket | tennis | the Olympics | Mars | Jupiter | water | oxygen | iron | the brain |
    sleep | dreams | yoga | running | Brazil | Japan | China | India | Canada | Mexico | Russia | Egypt |
    Australia | New York | California | the internet | a computer | a compiler | a database | a poem | a song |
    a story | a recipe | pizza | soup | the president | the king | a lawyer | a doctor | taxes | inflation |
    climate change | the weekend | Hamlet | Harry Potter | Star Wars | the Bible | philosophy | Plato | logic |
    algebra | calculus | geometry | prime numbers | pi | infinity | the meaning of life | a haiku | an essay |
    an email | my homework | my boss | my mother | my garden | a holiday | Christmas | Easter | bees | elephants |
    penguins | sharks | cats and dogs | the rain forest | plastic | energy | nuclear power | solar panels | trains |
    airplanes | the Titanic | World War II | the French Revolution | a black cat | an apple pie | fresh bread |
    good coffee | green tea | red wine | attention | a transformer | a KV cache | paged memory | a GPU |
    Apple Silicon | Metal | a kernel | memory | speed | light | sound | music | art | movies | games | books |
    fashion | shoes | health | food | travel | work | school | a joke | news | politics | religion | science
    """
)

UNKNOWN_TEMPLATES = phrases_in(
    """
    What is {t}? | Who is {t}? | Why is {t} important? | Tell me about {t}. | Explain {t}. |
    Explain {t} in simple words. | How does {t} work? | Where is {t}? | When was {t} invented? | Who invented {t}? |
    Write a poem about {t}. | Write a story about {t}. | Tell me a story about {t}. | Tell me a joke about {t}. |
    Tell me a joke. | Give me a recipe for {t}. | How do I make {t}? | What do you think about {t}? |
    Do you like {t}? | I like {t}. | I want to talk about {t}. | Can you explain {t}? |
    Describe {t} in one sentence. | What is the best thing about {t}? | How many people like {t}? | Is {t} good? |
    What happened to {t}? | Compare {t} and {u}. | What is the difference between {t} and {u}? |
    Which is better, {t} or {u}? | Translate {t} into French. | Translate "{t}" to German. | Summarize {t}. |
    Write an email about {t}. | Write code for {t}. | Write a function that sorts {t}. | How old is {t}? |
    How far is {t}? | How big is {t}? | Give me three facts about {t}. | List five things about {t}. |
    Help me with {t}. | I have a question about {t}. | Should I buy {t}? | What causes {t}? | Who wrote {t}? |
    What color is {t}? | What time is it? | What is the weather today? | What day is it today? |
    Sing a song about {t}. | Plan a trip to {t}. | How can I learn {t}? | Why do people like {t}? |
    What does {t} mean? | Define {t}. | Please explain {t} to me. | Can you write about {t}? |
    Write a haiku about {t}. | Write an essay about {t} and {u}. | Once upon a time there was {t} |
    Do you know {t}? | Have you heard of {t}? | Are you alive? | Are you a human? | How much does {t} cost? |
    Where can I find {t}? | What are the rules of {t}? | Make a list of {t}. | Draw {t}. | Show me {t}. |
    Find {t}. | Open {t}. | Play {t}. | Buy {t}. | Let us talk about {t}. | My favorite topic is {t}. |
    Yesterday I saw {t}. | I do not understand {t}. | {t} | {t}? | {t} and {u} | Is it true that {t} is like {u}? |
    Imagine {t}. | Pretend you are {t}. | Act as {t}. | Give me advice about {t}. | Why? | How? |
    What is the history of {t}? | What is the future of {t}? | Who was the first person to see {t}? | Solve {t}.
    """
)

# Several ways to say the same thing, and the one answer to all of them.
DIALOGUE: list[tuple[list[str], str]] = [
    (
        phrases_in(
            """
            Hello | Hello! | Hi | Hi! | Hey | Hey! | Hello there | Hi there! | hello | hi | Good morning |
            Good morning! |
            Good evening! | Hello. | Good day! | hey there | Greetings!
            """
        ),
        "Hello! How can I help you?",
    ),
    (
        phrases_in(
            """
            How are you? | How are you today? | Hello, how are you? | Hi, how are you? | how are you |
            How do you do? |
            Are you well? | How is it going? | Hi! How are you? | Hello! How are you?
            """
        ),
        "I am fine, thank you. How can I help you?",
    ),
    (
        phrases_in(
            """
            Who are you? | What are you? | who are you | Hi, who are you? | Hello! Who are you? |
            Tell me about yourself. |
            What is your name? | Which model are you? | What model is this? | Introduce yourself. | Are you ChatGPT? |
            Are you Qwen? | Are you a real model? | Hi! Who are you? | Hello, who are you? | What is this? |
            Who made you? |
            what are you? | How were you trained? | Please introduce yourself. | Who is this? | Who am I talking to?
            """
        ),
        "I am the small demo model of mlx_paged, trained on made-up text. Choose a real model with "
        "--model.",
    ),
    (
        phrases_in(
            """
            What can you do? | what can you do | What can I ask you? | Help | help | How can you help me? |
            What do you know? | What can I ask? | Can you help me? | What are you good at? | Hi! What can you do? |
            Hello, what can you do? | Show me what you can do. | What should I ask you? | What is possible here?
            """
        ),
        "I can remember facts, repeat words, continue sequences, count, and do small sums.",
    ),
    (
        phrases_in(
            """
            Thanks | Thanks! | Thank you | Thank you! | Thank you very much. | thanks | Thanks a lot! | Many thanks. |
            Great, thanks! | thank you | Thank you for your help. | Good, thank you.
            """
        ),
        "You are welcome!",
    ),
    (
        phrases_in(
            """
            Bye | Bye! | Goodbye | Goodbye! | See you later. | bye | Good night! | See you! | I have to go now. |
            Good night | See you tomorrow. | Bye bye! | exit | quit
            """
        ),
        "Goodbye!",
    ),
    (
        phrases_in(
            """
            Good. | Great! | Nice. | Very good! | Well done! | Okay. | OK | ok | Good job! | Perfect! | Cool |
            Wonderful! |
            Yes | No | yes | no | I see. | Fine. | Right. | Wow!
            """
        ),
        "Okay. What is next?",
    ),
]

UNKNOWN_ANSWER = (
    "I am a very small model and I do not know that. Ask me to remember, repeat, count or add."
)
REMEMBER_ANSWER = "Okay, I will remember that."

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer in short sentences.",
    "You are a friendly assistant. Answer briefly.",
    "Be brief.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are mlx_paged, a small demo model.",
    "Remember what the user tells you.",
    "Always be polite.",
    "You answer questions about facts that the user gave.",
]
