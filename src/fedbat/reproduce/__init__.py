"""The paper, reproduced: experiment files expand to cells, cells leave records, records make RESULTS.md."""

from fedbat.reproduce.cells import Cell
from fedbat.reproduce.record import Record, Records, load_record
from fedbat.reproduce.tables import Book, Row, Table, load_book

__all__ = ["Book", "Cell", "Record", "Records", "Row", "Table", "load_book", "load_record"]
