"""The dense part of a model: what follows its collections, cut out, compiled and checked."""
