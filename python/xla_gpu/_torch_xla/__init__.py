"""The torch_xla front end: lowering to StableHLO, the host FFI API, the PJRT plug-in."""
