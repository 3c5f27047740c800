"""Thin adapters to trainers."""
