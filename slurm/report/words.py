"""The words of the report in English and in Korean. A name that is not here cannot be shown.

And numbers, times and lists of shards as it writes them.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal, get_args

Language = Literal["en", "ko"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

WORDS: dict[str, tuple[str, str]] = {
    "report": ("Report of a data set", "데이터 세트 보고서"),
    "written": ("written {when} by shardprep {version}", "{when}, shardprep {version} 작성"),
    "tokens": ("tokens", "토큰"),
    "documents": ("documents", "문서"),
    "shards_done": ("shards done", "완료된 샤드"),
    "input": ("input", "입력"),
    "on_disk": ("on disk", "디스크 사용량"),
    "tokens_per_byte": ("tokens per byte", "바이트당 토큰"),
    # notes at the top
    "unfinished": (
        "Not finished: {done} of {total} shards are done, and all numbers are theirs. Missing: {missing}",
        "미완성: 샤드 {total}개 중 {done}개 완료. 모든 수치는 완료된 샤드의 것입니다. 없는 샤드: {missing}",
    ),
    "without_manifest": (
        "Not counted as done, since only their manifests (shard-*.json) are missing: {shards}",
        "매니페스트(shard-*.json)만 없어 완료로 세지 않은 샤드: {shards}",
    ),
    "index_alone": (
        "Only the manifests (shard-*.json) of these shards are missing: {shards}",
        "다음 샤드는 매니페스트(shard-*.json)만 없습니다: {shards}",
    ),
    "index_says": (
        "Tokens, documents, sources and size on disk are told by index.json. The loader needs no more.",
        "토큰, 문서, 소스, 디스크 사용량은 index.json의 값입니다. 로더에는 이것으로 충분합니다.",
    ),
    "bring_manifests": (
        "Bring the manifests here: they alone say lengths, what was left out, and how shards were made.",
        "매니페스트를 가져오십시오. 길이, 제외된 문서, 제작 과정은 매니페스트에만 있습니다.",
    ),
    "unverified": (
        "Nothing has verified it yet: run python -m preprocess verify {folder}",
        "아직 검증되지 않았습니다. 실행할 명령: python -m preprocess verify {folder}",
    ),
    "not_read": (
        "These manifests could not be read, and are in none of the numbers: {shards}. verify says more.",
        "매니페스트를 읽지 못해 수치에서 빠진 샤드: {shards}. 자세한 내용은 verify가 알려 줍니다.",
    ),
    "other_plan": (
        "These shards are of another plan, and are in none of the numbers: {shards}. verify says what to do.",
        "다른 계획의 것이어서 수치에서 빠진 샤드: {shards}. 할 일은 verify가 알려 줍니다.",
    ),
    "slurm_away": (
        "Slurm gave no answer: what ran, and how it ended, is told by the logs alone.",
        "Slurm이 응답하지 않았습니다. 무엇이 실행되었고 어떻게 끝났는지는 로그로만 판단했습니다.",
    ),
    # sources
    "sources": ("Sources", "소스"),
    "source": ("source", "소스"),
    "left_out": ("left out", "제외"),
    "bytes": ("bytes", "바이트"),
    "others": ("{number} other|{number} others", "그 밖의 {number}개"),
    "top_folder": ("(no subfolder)", "(하위 폴더 없음)"),
    # lengths
    "lengths": ("Length of documents", "문서 길이"),
    "documents_by_tokens": ("documents by their number of tokens", "토큰 수별 문서 수"),
    "no_documents": ("There are no documents.", "문서가 없습니다."),
    "mean_length": ("mean", "평균"),
    "median_length": ("half have fewer than", "절반이 이보다 짧음"),
    "n_tokens": ("{number} token|{number} tokens", "토큰 {number}개"),
    "from_to_tokens": ("{low} to {high} tokens", "토큰 {low}~{high}개"),
    "n_documents": ("{number} document|{number} documents", "문서 {number}개"),
    # left out
    "left_out_title": ("Documents left out", "제외된 문서"),
    "nothing_left_out": ("No document was left out as bad.", "잘못되어 제외된 문서가 없습니다."),
    "reason": ("reason", "이유"),
    "share": ("share of documents", "문서 비율"),
    "estimate_note": (
        "Bytes with ~ are estimated: not all quarantine files were read.",
        "~가 붙은 바이트는 추정값입니다. 격리 파일을 모두 읽지는 않았습니다.",
    ),
    "examples": ("Examples", "예"),
    "empty_lines": ("empty lines or rows", "빈 줄 또는 행"),
    "filtered": ("left out by --min_chars and --max_chars", "--min_chars, --max_chars로 제외"),
    "unit_byte": ("byte {offset}", "바이트 {offset}"),
    "unit_row": ("row {offset}", "행 {offset}"),
    "unit_byte of the text": ("byte {offset} of the text", "압축을 푼 텍스트의 바이트 {offset}"),
    "reason_undecodable": ("cannot be decoded", "디코딩할 수 없음"),
    "reason_uncuttable": (
        "too long, and cannot be cut for the tokenizer",
        "너무 길고 토크나이저를 위해 자를 수 없음",
    ),
    "reason_too_long": ("too long", "너무 긺"),
    "reason_bad_json": ("no JSON", "JSON이 아님"),
    "reason_surrogate": ("half of a surrogate pair", "서로게이트 쌍의 반쪽"),
    "reason_no_field": ("without the text field", "텍스트 필드 없음"),
    "reason_null_field": ("the text field is null", "텍스트 필드가 null"),
    "reason_wrong_type": ("the text field is no string", "텍스트 필드가 문자열이 아님"),
    "reason_mojibake": (
        "read in a wrong encoding, cannot be restored",
        "잘못된 인코딩으로 읽혔고 복원할 수 없음",
    ),
    # rows
    "rows": ("Rows: padding and cut documents", "행: 패딩과 잘린 문서"),
    "rows_of": ("rows of {seq_len} tokens", "토큰 {seq_len}개짜리 행"),
    "packing": ("packing", "묶는 방법"),
    "padding": ("padding", "패딩"),
    "across_rows": ("documents that do not lie whole in one row", "한 행에 온전히 들어가지 않은 문서"),
    "no_rows": (
        "A sample is a document: nothing is padded or cut on disk.",
        "샘플 하나가 문서 하나입니다. 디스크에서는 패딩하거나 자르지 않습니다.",
    ),
    # shards
    "shards": ("Size of shards", "샤드 크기"),
    "shards_by_bytes": ("shards by the size of their tar", "tar 크기별 샤드 수"),
    "least": ("least", "최소"),
    "median": ("median", "중앙값"),
    "most": ("most", "최대"),
    "tar_size": ("tar", "tar"),
    "n_shards": ("{number} shard|{number} shards", "샤드 {number}개"),
    "time_per_shard": ("time per shard", "샤드당 시간"),
    # work
    "work": ("Speed over time", "시간에 따른 속도"),
    "began": ("began", "시작"),
    "ended": ("ended", "끝"),
    "worked": ("time in which shards were made", "샤드를 만든 시간"),
    "speed": ("speed", "속도"),
    "n_tokens_per_s": ("{number} tokens/s", "토큰 {number}개/초"),
    "tokens_per_s_title": ("tokens per second", "초당 토큰"),
    "num_running_title": ("shards in the making at once", "동시에 만들던 샤드"),
    "shard_s_title": (
        "time per shard, by when it began: least to most, and the median",
        "시작 시각별 샤드당 시간: 최소~최대와 중앙값",
    ),
    "gaps": ("pauses, not drawn to scale (dashed lines)", "쉰 시간 (점선, 축에서 뺌)"),
    "gaps_together": ("{number} ({time})", "{number}번 ({time})"),
    "node": ("node", "노드"),
    "slow_shards": ("slow shards", "느린 샤드"),
    "on_node": ("{shard} ({time} on {node})", "{shard} ({node}에서 {time})"),
    "nodes": ("Nodes over time", "시간에 따른 노드"),
    "nodes_busy": (
        "how busy each node was; the darkest is the most shards at once",
        "노드가 얼마나 바빴는지. 가장 진한 곳이 동시에 가장 많은 샤드를 만든 때입니다",
    ),
    "node_words": (
        "{number} shard, {speed}/s|{number} shards, {speed}/s each",
        "샤드 {number}개, 각 {speed}/초",
    ),
    "n_failed": ("{number} failed task|{number} failed tasks", "실패한 태스크 {number}개"),
    "failing_nodes": (
        "Nodes that are not shown above, with their failed tasks: {nodes}.",
        "위에 없는 노드와 실패한 태스크 수: {nodes}.",
    ),
    "slowest_nodes": (
        "The {shown} slowest of {total} nodes are shown.",
        "노드 {total}개 중 가장 느린 {shown}개만 보여 줍니다.",
    ),
    # use
    "use": ("Used against asked for", "사용량과 요청량"),
    "cpu": ("CPU time", "CPU 시간"),
    "cpu_of": (
        "{used} of {had} that the processes had ({share})",
        "프로세스가 가진 {had} 중 {used} ({share})",
    ),
    "memory": ("memory", "메모리"),
    "largest_process": ("{size}, the largest process", "{size}, 가장 큰 프로세스"),
    "memory_used": ("most memory of a task", "태스크의 최대 메모리"),
    "longest_task": ("longest task", "가장 긴 태스크"),
    "core_hours": ("core hours", "코어 시간"),
    "core_hours_failed": (
        "{used}, {failed} of them by attempts that failed",
        "{used}, 그중 {failed}은 실패한 시도",
    ),
    "next_time": ("next time ask for", "다음에 요청할 값"),
    "not_submitted": (
        "Nothing was submitted to Slurm from this folder, so nothing is known of what was asked for.",
        "이 폴더에서 Slurm에 제출한 기록이 없어 요청량은 알 수 없습니다.",
    ),
    # OSTs
    "osts": ("Lustre storage targets (OSTs)", "Lustre 저장 대상(OST)"),
    "ost": ("OST", "OST"),
    "unknown": ("not known", "알 수 없음"),
    "osts_note": (
        "OSTs that hold the beginning of some tar: {number}; the fullest first.",
        "tar의 첫 부분이 있는 OST: {number}개. 가장 많이 찬 것부터 보입니다.",
    ),
    # attempts
    "attempts": ("Submitted and sent again", "제출과 재시도"),
    "submission": ("submission", "제출"),
    "when": ("when", "언제"),
    "tasks": ("tasks", "태스크"),
    "failed_tasks": ("of them failed", "실패한 태스크"),
    "num_shards": ("shards", "샤드"),
    "asked_for": ("a task asks for", "태스크당 요청"),
    "cpus": ("{number} CPU|{number} CPUs", "CPU {number}개"),
    "whole_node": ("a whole node", "노드 전체"),
    "retried": ("sent again after", "다시 보낸 이유"),
    "nothing_retried": ("Nothing had to be sent again.", "다시 보낸 것이 없습니다."),
    "on_nodes": ("{what}; on {nodes}", "{what}; 노드 {nodes}"),
    "shards_named": ("shards {shards}", "샤드 {shards}"),
    "send_again": (
        "To send what failed again: python -m slurm retry {folder}",
        "실패한 것을 다시 보내려면: python -m slurm retry {folder}",
    ),
    "restarts": ("started again by Slurm after", "Slurm이 다시 시작한 이유"),
    "n_tasks": ("{number} task|{number} tasks", "태스크 {number}개"),
    "restarted_shards": (
        "shards made by tasks that Slurm had started again",
        "Slurm이 다시 시작한 태스크가 만든 샤드",
    ),
    "failed": ("failed, and not made yet", "실패하여 아직 없음"),
    # again
    "again": ("Make it again", "다시 만들기"),
    "again_note": (
        "Equal input gives plan {plan_id} again, and then equal bytes. NEW is a new folder.",
        "입력이 같으면 같은 계획 {plan_id}이 되고, 바이트까지 같은 샤드가 나옵니다. NEW는 새 폴더입니다.",
    ),
    "input_dir": ("input folder", "입력 폴더"),
    "num_inputs": ("input files", "입력 파일"),
    "plan": ("plan", "계획"),
    "tokenizer": ("tokenizer", "토크나이저"),
    "vocab": ("{model} ({number} tokens, {sha})", "{model} (토큰 {number}개, {sha})"),
    "record": ("record", "레코드"),
    "text_versions": ("libraries that changed text", "텍스트를 바꾼 라이브러리"),
    "version_shardprep": ("shardprep", "shardprep"),
    "version_engine": ("engine", "엔진"),
    "version_python": ("Python", "Python"),
    "version_of": ("{version} ({number} shards)", "{version} (샤드 {number}개)"),
    "hours": ("{hours:,} h {minutes:02d} min", "{hours:,}시간 {minutes:02d}분"),
    "minutes": ("{minutes} min", "{minutes}분"),
    "minutes_and_seconds": ("{minutes} min {seconds:02d} s", "{minutes}분 {seconds:02d}초"),
    "seconds": ("{seconds:.3g} s", "{seconds:.3g}초"),
    "and_more": ("and {number} more", "외 {number}개"),
}


class Words:
    """Gives the words of one language by their name."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self._column = LANGUAGES.index(language)

    def __call__(self, name: str, **values: object) -> str:
        """The words of a name, with values in their places. What is before a "|" is for a ``number`` of 1."""
        one, bar, several = WORDS[name][self._column].partition("|")
        return (several if bar and str(values["number"]) != "1" else one).format(**values)

    def time(self, seconds: float) -> str:
        """``2 h 05 min``, ``15 min``, ``5 min 03 s`` or ``12.3 s``."""
        hours, minutes = divmod(round(seconds / 60), 60)
        if hours:
            return self("hours", hours=hours, minutes=minutes)
        if seconds >= 599.5:
            return self("minutes", minutes=minutes)
        if seconds >= 59.5:
            return self("minutes_and_seconds", minutes=round(seconds) // 60, seconds=round(seconds) % 60)
        return self("seconds", seconds=seconds)

    def reason(self, reason: str) -> str:
        """Why documents were left out; a reason that nobody translated stays as it is."""
        name = f"reason_{reason}"
        return self(name) if name in WORDS else reason


_MOST_IDS = 150  # characters of a list of shards

TimeForm = Literal["date", "minutes", "seconds", "seconds and zone"]
_FORMS: dict[TimeForm, str] = {
    "date": "%m-%d %H:%M",
    "minutes": "%H:%M",
    "seconds": "%H:%M:%S",
    "seconds and zone": "%Y-%m-%d %H:%M:%S %z",
}


def heights(numbers: Sequence[float]) -> list[float]:
    """Each as a share of the largest: 0 to 1."""
    most = max(numbers, default=0) or 1
    return [number / most for number in numbers]


def edge_labels(edges: Sequence[str], most: int = 7) -> list[tuple[float, str]]:
    """Labels of some edges of a histogram's columns, evenly from the first on; no text twice in a row."""
    steps = len(edges) - 1
    every = -(-steps // (most - 1))
    numbers = range(0, steps + 1, every)
    return [
        (number / steps, edges[number])
        for number in numbers
        if number == 0 or edges[number] != edges[number - every]
    ]


def short_ids(ids: str) -> str:
    """A list of ids such as ``0-2, 5``, cut where it is long."""
    if len(ids) <= _MOST_IDS:
        return ids.replace(",", ", ")
    return ids[: ids.rindex(",", 0, _MOST_IDS)].replace(",", ", ") + ", ..."


def percent(share: float) -> str:
    """``0.0123`` -> ``1.23%``."""
    if 0 < share < 0.00005:
        return "<0.01%"
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def ratio(value: float | None) -> str:
    """Three digits behind the point; a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"


def time_text(seconds: float, form: TimeForm) -> str:
    """A time, given in seconds since 1970, in the time zone of who writes the report."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime(_FORMS[form])


def core_hours_text(hours: float) -> str:
    """Three digits at least: ``0.0123``, ``12.3``, ``14,018``."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
