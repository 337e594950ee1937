"""``from loader.lightning import LoaderCallback``: a TokenLoader in Lightning's Trainer."""

from loader.train.lightning import LoaderCallback as LoaderCallback
