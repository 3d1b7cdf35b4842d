from kflats.calibration.collect import measure
from kflats.calibration.measurements import Statistics
from kflats.calibration.objectives import Projections, SampledLabels, TaskLoss
from kflats.codecs import Feedback, Float, Integer, Transform
from kflats.common.errors import KflatsError
from kflats.common.release import __version__
from kflats.common.text_files import read_texts
from kflats.compress.flats_search import search_flats
from kflats.compress.pipeline import Prepared, compress_, compress_folder
from kflats.evaluation.forms import run_as_
from kflats.evaluation.outputs import fidelity
from kflats.evaluation.proof import compare
from kflats.export.adapters import adapt_lora_
from kflats.export.dense import export_dense
from kflats.export.onnx import export_onnx
from kflats.importance import (
    InputGram,
    KroneckerFisher,
    RowFisher,
    TokenCounts,
    TokenFisher,
    TwoSided,
    Uniform,
    ZipfPrior,
)
from kflats.io import annotate_, load_, register_plugin, save
from kflats.methods import MESSI, SVD, Auto, Entrywise, Flats, KeepDense, KMeansSVD, RobustSVD, Subspace
from kflats.model.swap import restore_
from kflats.model.weights import find_weights
from kflats.numerics.loss import Huber, Power, Squared, Truncated
from kflats.numerics.robust_svd import Lewis
from kflats.planning.decide import plan
from kflats.recipe.budget import Budget, parse_budget
from kflats.recipe.recipe import Plan, Recipe
from kflats.recover.recover import recover_, recover_folder
from kflats.report.report import Report
from kflats.tables import CodedTable, TableEmbedding, TableEmbeddingBag, compress_table, open_table
from kflats.tasks.batches import task_batches
from kflats.tasks.scoring import score
from kflats.trimming.trimming import Trimmed, trim, trim_folder

__all__ = [
    "MESSI",
    "SVD",
    "Auto",
    "Budget",
    "CodedTable",
    "Entrywise",
    "Feedback",
    "Flats",
    "Float",
    "Huber",
    "InputGram",
    "Integer",
    "KMeansSVD",
    "KeepDense",
    "KflatsError",
    "KroneckerFisher",
    "Lewis",
    "Plan",
    "Power",
    "Prepared",
    "Projections",
    "Recipe",
    "Report",
    "RobustSVD",
    "RowFisher",
    "SampledLabels",
    "Squared",
    "Statistics",
    "Subspace",
    "TableEmbedding",
    "TableEmbeddingBag",
    "TaskLoss",
    "TokenCounts",
    "TokenFisher",
    "Transform",
    "Trimmed",
    "Truncated",
    "TwoSided",
    "Uniform",
    "ZipfPrior",
    "__version__",
    "adapt_lora_",
    "annotate_",
    "compare",
    "compress_",
    "compress_folder",
    "compress_table",
    "export_dense",
    "export_onnx",
    "fidelity",
    "find_weights",
    "load_",
    "measure",
    "open_table",
    "parse_budget",
    "plan",
    "read_texts",
    "recover_",
    "recover_folder",
    "register_plugin",
    "restore_",
    "run_as_",
    "save",
    "score",
    "search_flats",
    "task_batches",
    "trim",
    "trim_folder",
]
