"""scaled"""
