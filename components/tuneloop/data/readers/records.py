"""Records in a temporary file (``TMPDIR``), read by number: memory has eight bytes of each.

`csv_files.py` and `json_files.py` keep rows here where a file cannot be read by number.
"""

import tempfile
from array import array
from collections.abc import Sequence
from typing import Any


class RecordFile(Sequence[bytes]):
    """Records of bytes in the order in which they were appended.

    An index must not be negative and no slice. The file has no name and goes with this object.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as there are rows
        self._ends = array("q")

    def append(self, record: bytes) -> None:
        """Add a record. No record may have been read before, as reading moves the place of
        writing."""
        self._file.write(record)
        self._ends.append(self._file.tell())

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        start = self._ends[index - 1] if index else 0
        self._file.seek(start)
        return self._file.read(self._ends[index] - start)
