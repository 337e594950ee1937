"""``from loader.training import TrainingSetup``: what ``loader.set_up_training`` returns."""

from loader.train.training import TrainingSetup as TrainingSetup
