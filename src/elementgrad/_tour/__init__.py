"""The tour: questions, the cells of code that answer them, and a runner that shows what came of each."""
