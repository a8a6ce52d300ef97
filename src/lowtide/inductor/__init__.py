"""draft"""
from lowtide.inductor.backend import CompileBudget
__all__ = ["CompileBudget"]
