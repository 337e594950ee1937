"""``from loader.training import TrainingSetup``: what ``loader.set_up_training`` returns."""

from loader.train.set_up import TrainingSetup as TrainingSetup
