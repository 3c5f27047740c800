"""Elastic, deterministic data loading for vision-language models."""
