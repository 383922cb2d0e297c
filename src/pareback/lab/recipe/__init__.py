"""What an experiment is: its fields, how they are read and checked."""

from .schema import (
    DataRecipe,
    GoalRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    ScheduleRecipe,
    TeacherRecipe,
    TrainRecipe,
)

__all__ = [
    "DataRecipe",
    "GoalRecipe",
    "ModelRecipe",
    "OptimizerRecipe",
    "Recipe",
    "ScheduleRecipe",
    "TeacherRecipe",
    "TrainRecipe",
]
