"""Callbacks for other frameworks' trainers. A framework is imported only when its callback is created."""
