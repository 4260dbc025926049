"""DeepSpeed ZeRO: what its files say (states), what lies where (rows), and the checkpoint that they are (folder)."""
