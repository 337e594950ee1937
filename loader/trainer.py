"""``from loader.trainer import LoaderMixin``: a TokenLoader in transformers' Trainer."""

from loader.train.trainer import LoaderMixin as LoaderMixin
