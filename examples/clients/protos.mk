# Shared by the clients that generate code: where the contract is.
REPO    := $(abspath $(dir $(lastword $(MAKEFILE_LIST)))/../..)
INCLUDE := -I$(REPO)/protos -I$(REPO)/third_party/googleapis
PROTOS  := $(patsubst %,stagemesh/v1/%.proto,inference frame prompt sampling header pipeline replica tensor)
# The one file of googleapis that the contract imports, for languages whose packages lack it.
STATUS  := google/rpc/status.proto
