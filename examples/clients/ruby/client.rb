#!/usr/bin/env ruby
# frozen_string_literal: true

# A StageMesh client in Ruby, made from the .proto files alone. See ../README.md for what it does.
$LOAD_PATH.unshift(File.join(__dir__, "build"))
require "fileutils"
require "optparse"
require "grpc"
require "stagemesh/v1/inference_services_pb"
require "google/rpc/status_pb"

V1 = Stagemesh::V1
DETAILS = "grpc-status-details-bin"

# The one detail message that every error of the mesh carries; google-protobuf's Ruby package does not bring it.
Google::Protobuf::DescriptorPool.generated_pool.build do
  add_file("google/rpc/error_details.proto", syntax: :proto3) do
    add_message "google.rpc.ErrorInfo" do
      optional :reason, :string, 1
      optional :domain, :string, 2
      map :metadata, :string, :string, 3
    end
  end
end
ErrorInfo = Google::Protobuf::DescriptorPool.generated_pool.lookup("google.rpc.ErrorInfo").msgclass

def options(arguments)
  chosen = { head: "127.0.0.1:8470", out: ".", cancel_after: 0 }
  parser = OptionParser.new
  parser.on("--head ADDRESS") { |text| chosen[:head] = text }
  parser.on("--out DIR") { |text| chosen[:out] = text }
  parser.on("--seed N", Integer) { |number| chosen[:seed] = number }
  parser.on("--steps N", Integer) { |number| chosen[:num_inference_steps] = number }
  parser.on("--cancel-after N", Integer) { |number| chosen[:cancel_after] = number }
  chosen[:words] = parser.parse(arguments)
  chosen
end

def list(mesh)
  mesh.list_pipelines(V1::ListPipelinesRequest.new).pipelines.each do |pipeline|
    pipeline.stages.each do |stage|
      puts "#{pipeline.name}/#{stage.name} #{stage.stage_type} #{stage.ready_replicas}/#{stage.target_replicas}"
    end
  end
end

def request(chosen, prompt)
  knobs = chosen.slice(:seed, :num_inference_steps)
  params = V1::SamplingParams.new(diffusion: V1::DiffusionSamplingParams.new(**knobs))
  sampling = knobs.empty? ? [] : [V1::StageSampling.new(stage: "painter", params: params)]
  V1::GenerateRequest.new(prompt: V1::Prompt.new(text: prompt), sampling: sampling)
end

def save(folder, message, media)
  FileUtils.mkdir_p(folder)
  extension = media.mime_type.split("/").last
  path = File.join(folder, "#{message.request_id}-#{message.frame.stage}-#{media.index}.#{extension}")
  File.binwrite(path, media.data)
  puts "\nsaved #{path}"
end

def generate(mesh, chosen)
  call = mesh.generate(request(chosen, chosen[:words].join(" ")), return_op: true)
  call.execute.each do |message|
    frame = message.frame or next
    case frame.content
    when :text then print frame.text.text
    when :media then save(chosen[:out], message, frame.media)
    when :progress
      warn "#{frame.stage} #{frame.progress.step}/#{frame.progress.total_steps}"
      call.cancel if chosen[:cancel_after].positive? && frame.progress.step >= chosen[:cancel_after]
    end
  end
end

def reason(error)
  return "" unless error.metadata.key?(DETAILS)

  Google::Rpc::Status.decode(error.metadata[DETAILS]).details.each do |detail|
    return ErrorInfo.decode(detail.value).reason if detail.type_url.end_with?("google.rpc.ErrorInfo")
  end
  ""
end

begin
  command, *arguments = ARGV
  chosen = options(arguments)
  mesh = V1::InferenceService::Stub.new(chosen[:head], :this_channel_is_insecure)
  case command
  when "list" then list(mesh)
  when "generate" then generate(mesh, chosen)
  else abort "usage: client.rb list|generate [flags] [prompt]"
  end
rescue GRPC::Cancelled
  puts "\ncancelled"
  exit 3
rescue GRPC::BadStatus => e
  warn "#{e.class.name.split("::").last} #{reason(e)}: #{e.details}"
  exit 2
end
