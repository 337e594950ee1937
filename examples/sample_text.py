"""Write sample text, Korean and English, one document per line: python examples/sample_text.py FOLDER

Six files, about 450 KB, the same bytes each time. The sentences were written for this project and are
combined at random. Documents have one to a hundred sentences, as in real text.
"""

import argparse
import random
from pathlib import Path

NUM_FILES = 3  # per language
NUM_DOCUMENTS = 140  # per file

ENGLISH = [
    "The {adjective} {thing} in {place} was built {time}, and nobody has repaired it since.",
    "I bought a {adjective} {thing} from a neighbour in {place}; it worked for exactly {number} days.",
    "Why does every {thing} I own break {time}?",
    "If you walk from {place} to the river, count {number} lamps and turn left at the {thing}.",
    "My grandmother kept her {thing} under the stairs, wrapped in {number} sheets of newspaper.",
    "“You can't repair a {thing} with patience alone,” said the mechanic, “but it helps.”",
    "We measured the {thing} {number} times and wrote down a different value each time.",
    "It rained {time}, so the market in {place} opened {number} minutes late.",
    "A {adjective} idea is worth little until somebody in {place} tries it on a real {thing}.",
    "The report lists {number} causes, but the third one, a {adjective} {thing}, explains most of it.",
    "Don't touch the {thing} while it's hot!",
    "Trains to {place} leave every {number} minutes, and the last one is always {adjective}.",
    "She learned to draw by copying the same {thing} {time} until the lines stopped shaking.",
    "There were {number} people in the hall, and all of them were looking at the {thing}.",
    "Nothing in {place} is as {adjective} as the sound of a {thing} being moved at night.",
    "He wrote the address of {place} on the back of a ticket, then lost the ticket {time}.",
    "In short: a good film, a {adjective} ending, {number} out of 100.",
    "To start the {thing}, hold the switch for {number} seconds and wait for the green light.",
    "The library of {place} lends seeds, tools and, since last year, one {adjective} {thing}.",
    "They've argued about the {thing} {time}, and they'll argue about it again.",
    "After {number} kilometres the road becomes {adjective} and the signs for {place} disappear.",
    "What remains of the old school is a wall, a {thing} and {number} apple trees.",
]
ENGLISH_WORDS = {
    "adjective": "quiet|borrowed|narrow|half-finished|generous|crooked|plain|stubborn|pale|reliable",
    "thing": "bridge|kettle|ladder|clock|piano|bicycle|window|motor|suitcase|telescope|stove|map",
    "place": "the harbour|Mill Street|the northern valley|Aldersea|the upper town|the station",
    "time": "last winter|twice a week|before breakfast|in the same month|for years|on a Sunday",
}
KOREAN = [
    "{place}에서 만난 {person}의 이야기가 아직도 기억에 남는다.",
    "{time} {place}까지 걸어갔는데 문이 닫혀 있었다.",
    "정말 {adjective} 영화였다. {number}점 주고 싶다!",
    "{person}의 {adjective} 목소리를 들으면 하루가 조금 가벼워진다.",
    "기차는 {number}분 늦게 도착했고, {place}에는 아무도 없었다.",
    "왜 {time} 이런 일이 생기는지 모르겠네요ㅠㅠ",
    "할머니는 {place}에서 가져온 콩으로 두부를 {number}모 만드셨다.",
    "“서두르지 않아도 괜찮아.” {person}도 그렇게 말했다.",
    "{place}의 겨울은 길고, 봄은 {adjective} 손님처럼 잠깐 들렀다 간다.",
    "설명서 {number}쪽에 나온 대로 했더니 {time} 잘 작동합니다.",
    "처음에는 지루했지만 뒤로 갈수록 {adjective} 장면이 많아서 좋았어요~",
    "{time} 비가 와서 {place}의 시장은 {number}분 늦게 문을 열었다.",
    "도서관 2층 창가 자리에서 {person}의 {adjective} 편지를 다시 읽었다.",
    "{number}번이나 재어 보았지만 잴 때마다 값이 달랐다.",
    "{place}부터 강까지는 가로등이 {number}개 서 있다.",
    "배우들의 연기는 좋았으나 결말이 너무 {adjective} 느낌이라 아쉽다.",
    "{person}만 아는 {adjective} 길을 따라 {place}에 닿았다.",
    "보고서에는 원인이 {number}가지 적혀 있지만 세 번째가 가장 중요하다.",
    "그날 이후로 {place}에서는 {time} 종소리가 울린다.",
    "고장 난 자전거를 {person}에게 맡겼더니 {number}일 만에 고쳐 주었다.",
    "{adjective} 생각도 {place}에서 직접 해 보기 전에는 소용이 없다.",
    "ㅋㅋㅋ {time} 또 보게 되는 {adjective} 드라마",
]
KOREAN_WORDS = {
    "adjective": "조용한|따뜻한|낯선|평범한|엉뚱한|솔직한|희미한|든든한|서투른|뜻밖의",
    "person": "옆집 아저씨|담임 선생님|오래된 친구|빵집 주인|막내 동생|기관사|사진사",
    "place": "바닷가 마을|시청 앞 광장|북쪽 골짜기|작은 역|윗동네|시장 골목|옛 학교",
    "time": "지난겨울에|매주 두 번씩|아침마다|같은 달에|몇 년째|일요일에도",
}


def document(rng: random.Random, sentences: list[str], words: dict[str, str]) -> str:
    """Return one line of text. Most documents are short, a few are very long."""
    num_sentences = min(100, 1 + int(rng.paretovariate(0.9)))
    return " ".join(
        rng.choice(sentences).format(
            number=rng.randrange(2, 100),
            **{slot: rng.choice(choices.split("|")) for slot, choices in words.items()},
        )
        for _ in range(num_sentences)
    )


def write_sample_text(folder: Path) -> None:
    """Write the files into ``folder``, over those of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    for language, sentences, words in (("en", ENGLISH, ENGLISH_WORDS), ("ko", KOREAN, KOREAN_WORDS)):
        for number in range(NUM_FILES):
            rng = random.Random(f"{language} {number}")  # noqa: S311 - the text must be the same each time
            lines = [document(rng, sentences, words) + "\n" for _ in range(NUM_DOCUMENTS)]
            (folder / f"{language}_{number}.txt").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the files")
    folder = parser.parse_args().folder
    write_sample_text(folder)
    for path in sorted(folder.glob("*.txt")):
        num_lines = path.read_bytes().count(b"\n")
        print(f"{path}: {path.stat().st_size:,} bytes, {num_lines} documents")


if __name__ == "__main__":
    main()
