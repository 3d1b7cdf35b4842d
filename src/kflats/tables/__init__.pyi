from kflats.tables.compress import compress_table as compress_table
from kflats.tables.modules import TableEmbedding as TableEmbedding
from kflats.tables.modules import TableEmbeddingBag as TableEmbeddingBag
from kflats.tables.table import CodedTable as CodedTable
from kflats.tables.table import open_table as open_table
