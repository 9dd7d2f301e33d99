#!/bin/sh
# What the go, java, cpp and ruby clients build with, from Debian 12's own packages. Run as root.
set -eu
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
    make protobuf-compiler protobuf-compiler-grpc \
    golang-go golang-google-grpc-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev \
    protoc-gen-go protoc-gen-go-grpc \
    g++ pkg-config libgrpc++-dev libprotobuf-dev \
    default-jdk-headless libgrpc-java libprotobuf-java libnetty-java libgoogle-gson-java libguava-java \
    libgeronimo-annotation-1.3-spec-java libopencensus-java libperfmark-java protobuf-compiler-grpc-java-plugin \
    ruby ruby-grpc ruby-google-protobuf
