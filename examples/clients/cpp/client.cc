// A StageMesh client in C++, made from the .proto files alone. See ../README.md for what it does.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/grpcpp.h>

#include "google/rpc/status.pb.h"
#include "stagemesh/v1/inference.grpc.pb.h"

namespace v1 = stagemesh::v1;

struct Options {
  std::string command, prompt;
  std::map<std::string, std::string> flags{{"head", "127.0.0.1:8470"}, {"out", "."}};

  long Number(const std::string& name, long otherwise) const {
    auto found = flags.find(name);
    return found == flags.end() ? otherwise : std::stol(found->second);
  }
};

Options Parse(int argc, char** argv) {
  Options options;
  options.command = argc > 1 ? argv[1] : "";
  for (int i = 2; i < argc; ++i) {
    std::string word = argv[i];
    if (word.rfind("--", 0) == 0 && i + 1 < argc) {
      options.flags[word.substr(2)] = argv[++i];
    } else {
      options.prompt += (options.prompt.empty() ? "" : " ") + word;
    }
  }
  return options;
}

// Reads the `reason` (field 1) of a google.rpc.ErrorInfo, a message that Debian's packages do not bring.
std::string Reason(const grpc::Status& status) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    if (detail.type_url().find("google.rpc.ErrorInfo") == std::string::npos) continue;
    google::protobuf::io::CodedInputStream input(
        reinterpret_cast<const uint8_t*>(detail.value().data()), static_cast<int>(detail.value().size()));
    uint32_t length = 0;
    std::string reason;
    if (input.ReadTag() == 10 && input.ReadVarint32(&length) && input.ReadString(&reason, length)) return reason;
  }
  return "";
}

int Finish(const grpc::Status& status) {
  if (status.ok()) return 0;
  if (status.error_code() == grpc::StatusCode::CANCELLED) {
    std::cout << "\ncancelled\n";
    return 3;
  }
  std::cerr << status.error_code() << " " << Reason(status) << ": " << status.error_message() << "\n";
  return 2;
}

int List(v1::InferenceService::Stub& mesh) {
  grpc::ClientContext context;
  v1::ListPipelinesResponse answer;
  grpc::Status status = mesh.ListPipelines(&context, {}, &answer);
  for (const auto& pipeline : answer.pipelines()) {
    for (const auto& stage : pipeline.stages()) {
      std::cout << pipeline.name() << "/" << stage.name() << " " << stage.stage_type() << " " << stage.ready_replicas()
                << "/" << stage.target_replicas() << "\n";
    }
  }
  return Finish(status);
}

v1::GenerateRequest Request(const Options& options) {
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text(options.prompt);
  long seed = options.Number("seed", -1), steps = options.Number("steps", -1);
  if (seed >= 0 || steps >= 0) {
    auto* sampling = request.add_sampling();
    sampling->set_stage("painter");
    auto* diffusion = sampling->mutable_params()->mutable_diffusion();
    if (seed >= 0) diffusion->set_seed(seed);
    if (steps >= 0) diffusion->set_num_inference_steps(static_cast<uint32_t>(steps));
  }
  return request;
}

void Save(const Options& options, const v1::GenerateResponse& message) {
  const auto& media = message.frame().media();
  std::filesystem::path folder = options.flags.at("out");
  std::filesystem::create_directories(folder);
  std::string extension = media.mime_type().substr(media.mime_type().rfind('/') + 1);
  auto path = folder / (message.request_id() + "-" + message.frame().stage() + "-" + std::to_string(media.index()) +
                        "." + extension);
  std::ofstream(path, std::ios::binary) << media.data();
  std::cout << "\nsaved " << path.string() << "\n";
}

int Generate(v1::InferenceService::Stub& mesh, const Options& options) {
  grpc::ClientContext context;
  auto stream = mesh.Generate(&context, Request(options));
  long cancel_after = options.Number("cancel-after", 0);
  v1::GenerateResponse message;
  while (stream->Read(&message)) {
    const auto& frame = message.frame();
    if (frame.has_text()) std::cout << frame.text().text() << std::flush;
    if (frame.has_media()) Save(options, message);
    if (frame.has_progress()) {
      std::cerr << frame.stage() << " " << frame.progress().step() << "/" << frame.progress().total_steps() << "\n";
      if (cancel_after > 0 && frame.progress().step() >= cancel_after) context.TryCancel();
    }
  }
  return Finish(stream->Finish());
}

int main(int argc, char** argv) {
  Options options = Parse(argc, argv);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);
  auto channel = grpc::CreateCustomChannel(options.flags["head"], grpc::InsecureChannelCredentials(), arguments);
  auto mesh = v1::InferenceService::NewStub(channel);
  if (options.command == "list") return List(*mesh);
  if (options.command == "generate") return Generate(*mesh, options);
  std::cerr << "usage: client list|generate [flags] [prompt]\n";
  return 1;
}
