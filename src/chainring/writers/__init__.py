"""Writers: send the rows of a log to files and services such as TensorBoard, W&B and MLflow."""

from chainring.reporting.media import Histogram, Image, Text
from chainring.writers.base import Record, Run, Writer
from chainring.writers.comet import CometWriter
from chainring.writers.csv import CsvWriter
from chainring.writers.mlflow import MlflowWriter
from chainring.writers.tensorboard import TensorBoardWriter
from chainring.writers.trackio import TrackioWriter
from chainring.writers.wandb import WandbWriter

__all__ = [
    "CometWriter",
    "CsvWriter",
    "Histogram",
    "Image",
    "MlflowWriter",
    "Record",
    "Run",
    "TensorBoardWriter",
    "Text",
    "TrackioWriter",
    "WandbWriter",
    "Writer",
]
