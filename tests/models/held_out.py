"""A text that no model has been trained on."""

PARAGRAPH = (
    "On the morning of the harvest fair, the miller's daughter found that the small bridge had lost three of its "
    "planks during the night. She counted 14 boards in the shed, chose the four that were straight, and carried them "
    "down to the stream before breakfast. Two would have been enough if the water had been lower, but the spring rain "
    "had not stopped for nine days. By noon the carts from the valley could cross again, and nobody asked who had done "
    "the work. In the evening she wrote one line in her notebook: a bridge that holds is a bridge that nobody notices."
)
