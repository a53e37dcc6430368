"""What silently loses updates in anyone's optimizer: read, never stepped or changed."""
