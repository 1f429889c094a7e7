"""rounding"""
