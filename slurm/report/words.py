"""The report's words in Korean. The English ones stand where they are used, in sections.j2.

A text with ``|`` has two forms: the first is for a ``number`` of 1. Korean needs one.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from shardprep.console import short_time

Language = Literal["en", "ko"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

REASONS = {  # why a document was left out, as its quarantine file says -> as people read it
    "undecodable": "cannot be decoded",
    "uncuttable": "too long, and cannot be cut for the tokenizer",
    "too_long": "too long",
    "bad_json": "no JSON",
    "surrogate": "half of a surrogate pair",
    "no_field": "without the text field",
    "null_field": "the text field is null",
    "wrong_type": "the text field is no string",
    "mojibake": "decoded with a wrong encoding, cannot be restored",
}

# fmt: off
KOREAN = {
    "Report of a data set": "데이터 세트 보고서",
    "written {when} by shardprep {version}": "{when}, shardprep {version} 작성",
    "tokens": "토큰",
    "documents": "문서",
    "shards": "샤드",
    "bytes": "바이트",
    "shards done": "완료된 샤드",
    "input": "입력",
    "on disk": "디스크 사용량",
    "How documents begin": "문서의 첫 부분",
    "Documents that are alike": "서로 같거나 비슷한 문서",
    "the first documents of shard {shard}": "샤드 {shard}의 앞부분 문서",
    "equal to an earlier one": "앞의 문서와 같음",
    "nearly equal to an earlier one": "앞의 문서와 거의 같음",
    "equal to {address}": "{address}와(과) 같음",
    "nearly equal to {address}": "{address}와(과) 거의 같음",
    "An estimate: nearly equal are documents that share about 3/4 of their runs of five tokens, or more. In rows, a part of a document counts as one.": "추정값입니다. 연속한 토큰 5개짜리 조각의 약 3/4 이상이 같으면 거의 같은 문서로 셉니다. 행에서는 문서의 일부도 하나로 셉니다.",
    "shardprep peek {folder} ADDRESS finds each of them.": "각 문서를 찾으려면: shardprep peek {folder} 주소",
    "Decoded; shardprep peek {folder} ADDRESS shows more.": "디코딩한 것입니다. 더 보려면: shardprep peek {folder} 주소",
    "text": "텍스트",
    "values": "값",
    "per shard": "샤드당",
    "length": "길이",
    "size": "크기",
    "from": "시각",
    "share of tokens": "토큰 비율",
    "median time of a shard": "샤드당 시간의 중앙값",
    "share": "비율",
    "bytes of text per token": "토큰당 텍스트 바이트",
    "bytes per token": "토큰당 바이트",
    "characters per token": "토큰당 글자",
    "Text is what was encoded, as UTF-8: after stripping, changes and templates.": "텍스트는 인코딩한 그대로(공백 제거, 변경, 템플릿 적용 뒤)의 UTF-8입니다.",
    "Text is not counted: some shards were made by a shardprep that did not count it.": "텍스트를 세지 않던 버전의 shardprep이 만든 샤드가 있어 텍스트 수치가 없습니다.",
    "Only the manifests (shard-*.json) of these shards are missing: {shards}": "다음 샤드는 매니페스트(shard-*.json)만 없습니다: {shards}",
    "Tokens, documents, sources and size on disk are from index.json. The loader needs no more.": "토큰, 문서, 소스, 디스크 사용량은 index.json의 값입니다. 로더에는 이것으로 충분합니다.",
    "Copy the manifests here: only they have lengths, documents left out, and how shards were made.": "매니페스트를 이 폴더로 복사하십시오. 문서 길이, 제외된 문서, 제작 과정은 매니페스트에만 있습니다.",
    "Not finished: {done} of {total} shards are done, and all numbers are theirs. Missing: {missing}": "아직 끝나지 않았습니다. 샤드 {total}개 중 {done}개가 완료되었고, 모든 수치는 완료된 샤드만 센 것입니다. 없는 샤드: {missing}",
    "Shards that do not count as done, because their manifests (shard-*.json) are missing: {shards}.": "매니페스트(shard-*.json)가 없어 완료로 세지 않은 샤드: {shards}.",
    "Not verified yet: run shardprep verify {folder}": "아직 검증되지 않았습니다. 실행할 명령: shardprep verify {folder}",
    "Shards whose manifests cannot be read, and which no number counts: {shards}. Run verify for details.": "매니페스트를 읽을 수 없어 수치에서 빠진 샤드: {shards}. 자세한 내용은 verify를 실행하면 나옵니다.",
    "Shards of another plan, which no number counts: {shards}. Run verify to learn what to do.": "다른 계획으로 만들어 수치에서 빠진 샤드: {shards}. 해결 방법은 verify를 실행하면 나옵니다.",
    "Slurm did not answer. What ran and how it ended is known from logs only.": "Slurm이 응답하지 않았습니다. 무엇이 실행되었고 어떻게 끝났는지는 로그로만 판단했습니다.",
    "Sources": "소스",
    "source": "소스",
    "left out": "제외",
    "(no subfolder)": "(하위 폴더 없음)",
    "{number} other|{number} others": "그 밖의 {number}개",
    "Length of documents": "문서 길이",
    "documents by number of tokens": "토큰 수별 문서 수",
    "{low} to {high} tokens": "토큰 {low}~{high}개",
    "{number} document|{number} documents": "문서 {number}개",
    "Names in the input folder that are no input": "입력 폴더에서 입력이 아닌 이름",
    "names": "이름 수",
    "such as": "예",
    "unknown suffix": "모르는 확장자",
    "file of a repository": "저장소 안내 파일",
    "folder": "폴더",
    "link to a folder": "폴더를 가리키는 링크",
    "folder that is taken already": "이미 읽은 폴더",
    "note of datasets": "datasets의 부속 파일",
    "hidden": "숨김 파일",
    "AppleDouble": "macOS 부속 파일(AppleDouble)",
    "FIFO, socket or device": "FIFO, 소켓 또는 장치",
    "{number} token|{number} tokens": "토큰 {number}개",
    "share of tokens by the length of their document": "문서 길이별 토큰 비율",
    "tokens of a document": "문서당 토큰",
    "all": "전체",
    "p90: 90% of the documents have at most so many tokens; from 16 tokens on it may be up to 12% too high.": "p90: 문서의 90%는 토큰이 이 수 이하입니다. 16개부터는 최대 12% 크게 나올 수 있습니다.",
    "mean": "평균",
    "median": "중앙값",
    "There are no documents.": "문서가 없습니다.",
    "Documents left out": "제외된 문서",
    "No document was left out as bad.": "오류로 제외된 문서가 없습니다.",
    "reason": "이유",
    "share of documents": "문서 비율",
    "not known": "알 수 없음",
    "Bytes with ~ are estimated, because not all quarantine files were read.": "~가 붙은 바이트는 추정값입니다. 격리 파일을 모두 읽지는 않았습니다.",
    "empty lines or rows": "빈 줄 또는 행",
    "left out by --min_chars and --max_chars": "--min_chars, --max_chars로 제외",
    "withdrawn later, and masked by loaders": "나중에 철회되어 로더가 가리는 문서",
    "byte {offset}": "바이트 {offset}",
    "row {offset}": "행 {offset}",
    "byte {offset} of the text": "압축을 푼 텍스트의 바이트 {offset}",
    "cannot be decoded": "디코딩할 수 없음",
    "too long, and cannot be cut for the tokenizer": "너무 길고, 토크나이저에 맞게 자를 수 없음",
    "too long": "너무 긺",
    "no JSON": "JSON이 아님",
    "half of a surrogate pair": "서로게이트 쌍의 반쪽",
    "without the text field": "텍스트 필드 없음",
    "the text field is null": "텍스트 필드가 null",
    "the text field is no string": "텍스트 필드가 문자열이 아님",
    "decoded with a wrong encoding, cannot be restored": "잘못된 인코딩으로 디코딩되어 복원할 수 없음",
    "Rows: padding and cut documents": "행: 패딩과 잘린 문서",
    "rows of {seq_len} tokens": "토큰 {seq_len}개짜리 행",
    "packing": "패킹",
    "padding": "패딩",
    "documents that do not lie whole in one row": "한 행에 온전히 들어가지 않은 문서",
    "A sample is a document: nothing is padded or cut on disk.": "샘플 하나가 문서 하나입니다. 디스크에서는 패딩하거나 자르지 않습니다.",
    "For validation: {documents} documents, {tokens} tokens (--validation_fraction {fraction}).": (
        "검증용: 문서 {documents}개, 토큰 {tokens}개 (--validation_fraction {fraction})."
    ),
    "Size of shards": "샤드 크기",
    "shards by the size of their tar": "tar 크기별 샤드 수",
    "{number} shard|{number} shards": "샤드 {number}개",
    "least": "최소",
    "most": "최대",
    "time per shard": "샤드당 시간",
    "Used against asked for": "사용량과 요청량",
    "CPU time": "CPU 시간",
    "{used} of {had} that the processes had ({share})": "프로세스에 주어진 {had} 중 {used} ({share})",
    "memory": "메모리",
    "{size}, the largest process": "{size}, 가장 큰 프로세스",
    "core hours": "코어 시간",
    "{used}, {failed} of them by attempts that failed": "{used}, 그중 {failed}은 실패한 시도",
    "submission": "제출",
    "attempt that left a shard unmade": "샤드를 남긴 시도",
    "how it ended": "끝난 이유",
    "made by now": "지금까지 완료",
    "runs, or cannot be seen from here": "실행 중이거나 여기서 보이지 않음",
    "a task asks for": "태스크당 요청",
    "most memory of a task": "태스크의 최대 메모리",
    "longest task": "가장 긴 태스크",
    "{number} CPU|{number} CPUs": "CPU {number}개",
    "a whole node": "노드 전체",
    "next time ask for": "다음에 요청할 값",
    "No submission is recorded, so there is nothing to compare with.": "제출 기록이 없어 비교할 값이 없습니다.",
    "Lustre storage targets (OSTs)": "Lustre 저장 대상(OST)",
    "OSTs that hold the beginning of a tar: {number}; the fullest come first.": "tar의 첫 부분이 있는 OST: {number}개. 가장 많이 찬 것부터 보입니다.",
    "and {number} more": "외 {number}개",
    "Submitted and sent again": "제출과 재시도",
    "when": "언제",
    "tasks": "태스크",
    "of them failed": "실패한 태스크",
    "sent again after": "다시 보낸 이유",
    "{what}; on {nodes}": "{what}; 노드 {nodes}",
    "started again by Slurm after": "Slurm이 다시 시작한 이유",
    "{number} task|{number} tasks": "태스크 {number}개",
    "shards made by tasks that Slurm had started again": "Slurm이 다시 시작한 태스크가 만든 샤드",
    "failed, and not made yet": "실패하여 아직 없음",
    "shards {shards}": "샤드 {shards}",
    "To send what failed again: shardprep {command} {folder}": "실패한 것을 다시 보내는 명령: shardprep {command} {folder}",
    "Nothing had to be sent again.": "다시 보낸 것이 없습니다.",
    "Speed over time": "시간에 따른 속도",
    "began": "시작",
    "ended": "끝",
    "time in which shards were made": "샤드를 만든 시간",
    "speed": "속도",
    "{number} tokens/s": "초당 {number} 토큰",
    "pauses, which the time axis leaves out (dashed lines)": "쉰 시간 (점선, 시간 축에서 뺌)",
    "slow shard": "느린 샤드",
    "node": "노드",
    "{shard} ({time} on {node})": "{shard} ({node}에서 {time})",
    "tokens per second": "초당 토큰 수",
    "shards in progress": "동시에 만들던 샤드",
    "time per shard, by when it began: least to most, and the median": "시작 시각별 샤드당 시간: 최소~최대와 중앙값",
    "Nodes over time": "시간에 따른 노드",
    "how busy each node was; the darkest is the most shards at once": "노드가 얼마나 바빴는지. 가장 진한 곳이 동시에 가장 많은 샤드를 만든 때입니다",
    "{number} shard, {speed}/s|{number} shards, {speed}/s each": "샤드 {number}개, 각 {speed}/s",
    "{number} failed task|{number} failed tasks": "실패한 태스크 {number}개",
    "The {shown} slowest of {total} nodes are shown.": "노드 {total}개 중 가장 느린 {shown}개만 보여 줍니다.",
    "Nodes that are not shown above, with their failed tasks: {nodes}.": "위에 없는 노드와 실패한 태스크 수: {nodes}.",
    "Make it again": "다시 만들기",
    "Equal input gives plan {plan_id} again, and then equal bytes. NEW is a new folder.": "입력이 같으면 같은 계획 {plan_id}이 되고, 바이트까지 같은 샤드가 나옵니다. NEW는 새 폴더입니다.",
    "plan": "계획",
    "input folder": "입력 폴더",
    "input files": "입력 파일",
    "tokenizer": "토크나이저",
    "{model} ({number} tokens, {sha})": "{model} (토큰 {number}개, {sha})",
    "documents begin and end with": "문서의 처음과 끝",
    "{begin} and {end}": "처음 {begin}, 끝 {end}",
    "no token": "토큰 없음",
    "record": "레코드",
    "libraries that changed text": "텍스트를 바꾼 라이브러리",
    "engine": "엔진",
    "{name} ({number} shards)": "{name} (샤드 {number}개)",
}
# fmt: on
_UNITS = {" h": "시간", " min": "분", " s": "초"}


class Words:
    """Gives the report's texts and times in one language."""

    def __init__(self, language: Language) -> None:
        self.language = language

    def __call__(self, text: str, /, **values: object) -> str:
        """The text in this language, or else in English, with values in their places."""
        shown = KOREAN.get(text, text) if self.language == "ko" else text
        if "number" in values and "|" in shown:
            shown = shown.split("|")[str(values["number"]) != "1"]
        return shown.format(**values) if values else shown

    def time(self, seconds: float) -> str:
        """``2 h 05 min``, or ``2시간 05분``."""
        shown = short_time(seconds)
        return (
            re.sub(r" (h|min|s)\b", lambda unit: _UNITS[unit[0]], shown) if self.language == "ko" else shown
        )
