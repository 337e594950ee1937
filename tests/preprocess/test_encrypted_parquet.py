"""Parquet files with encrypted columns, of which pyarrow ends the process, are refused by file and column."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest

encryption: Any = pytest.importorskip("pyarrow.parquet.encryption", reason="this pyarrow has no encryption")

if TYPE_CHECKING:
    from tests.conftest import Prep

TABLE = pyarrow.table({
    "secret": [f"secret {n}" for n in range(40)],
    "text": [f"text {n}" for n in range(40)],
    "meta": [{"a": n, "b": "x"} for n in range(40)],
})  # fmt: skip


class KeyService(encryption.KmsClient):
    """Keeps keys as they are."""

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
        return base64.b64decode(wrapped)


def write_encrypted(path: Path, **config: Any) -> None:
    if "uniform_encryption" in config and not hasattr(
        encryption.EncryptionConfiguration, "uniform_encryption"
    ):
        pytest.skip("this pyarrow cannot write it")
    factory = encryption.CryptoFactory(lambda _: KeyService())
    properties = factory.file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(footer_key="footer", data_key_length_bits=128, **config),
    )
    with pyarrow.parquet.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE, row_group_size=10)


@pytest.mark.parametrize(
    "config",
    [
        {"plaintext_footer": True, "column_keys": {"k": ["secret"]}},
        {"plaintext_footer": True, "column_keys": {"k": ["text"]}},
        {"plaintext_footer": True, "column_keys": {"k": ["meta.b"], "l": ["secret"]}},
        {
            "plaintext_footer": True,
            "column_keys": {"k": ["secret"]},
            "encryption_algorithm": "AES_GCM_CTR_V1",
        },
        {"column_keys": {"k": ["secret"]}},
        {"uniform_encryption": True},
    ],
    ids=["another column", "the text", "nested", "CTR", "the footer too", "all"],
)
def test_a_file_with_an_encrypted_column_is_refused_by_its_name(
    prep: Prep, raw: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    path = raw / "a.parquet"
    write_encrypted(path, **config)
    ended = prep.command(
        "plan", "--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir
    )
    assert ended.code == 65, ended.text
    (line,) = (line for line in ended.text.splitlines() if str(path) in line)
    assert "encrypted" in line
