import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.Status;
import dev.stagemesh.v1.DiffusionSamplingParams;
import dev.stagemesh.v1.Frame;
import dev.stagemesh.v1.GenerateRequest;
import dev.stagemesh.v1.GenerateResponse;
import dev.stagemesh.v1.InferenceServiceGrpc;
import dev.stagemesh.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.stagemesh.v1.ListPipelinesRequest;
import dev.stagemesh.v1.MediaOutput;
import dev.stagemesh.v1.PipelineInfo;
import dev.stagemesh.v1.Prompt;
import dev.stagemesh.v1.SamplingParams;
import dev.stagemesh.v1.StageInfo;
import dev.stagemesh.v1.StageSampling;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;

/** A StageMesh client in Java, made from the .proto files alone. See ../README.md for what it does. */
public final class Client {
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

  private final Map<String, String> flags = new HashMap<>(Map.of("head", "127.0.0.1:8470", "out", "."));
  private final List<String> words = new ArrayList<>();

  public static void main(String[] arguments) throws Exception {
    System.exit(new Client().run(arguments));
  }

  private int run(String[] arguments) throws Exception {
    for (int i = 1; i < arguments.length; i++) {
      if (arguments[i].startsWith("--") && i + 1 < arguments.length) {
        flags.put(arguments[i].substring(2), arguments[++i]);
      } else {
        words.add(arguments[i]);
      }
    }
    ManagedChannel channel =
        NettyChannelBuilder.forTarget(flags.get("head")).usePlaintext().maxInboundMessageSize(64 << 20).build();
    InferenceServiceBlockingStub mesh = InferenceServiceGrpc.newBlockingStub(channel);
    try {
      switch (arguments.length > 0 ? arguments[0] : "") {
        case "list":
          list(mesh);
          return 0;
        case "generate":
          generate(mesh, String.join(" ", words));
          return 0;
        default:
          System.err.println("usage: client list|generate [flags] [prompt]");
          return 1;
      }
    } catch (StatusRuntimeException error) {
      if (error.getStatus().getCode() == io.grpc.Status.Code.CANCELLED) {
        System.out.println("\ncancelled");
        return 3;
      }
      System.err.printf("%s %s: %s%n", error.getStatus().getCode(), reason(error), error.getStatus().getDescription());
      return 2;
    } finally {
      channel.shutdownNow();
    }
  }

  private void list(InferenceServiceBlockingStub mesh) {
    for (PipelineInfo pipeline : mesh.listPipelines(ListPipelinesRequest.getDefaultInstance()).getPipelinesList()) {
      for (StageInfo stage : pipeline.getStagesList()) {
        System.out.printf("%s/%s %s %d/%d%n", pipeline.getName(), stage.getName(), stage.getStageType(),
            stage.getReadyReplicas(), stage.getTargetReplicas());
      }
    }
  }

  private void generate(InferenceServiceBlockingStub mesh, String prompt) throws Exception {
    int cancelAfter = Integer.parseInt(flags.getOrDefault("cancel-after", "0"));
    Context.CancellableContext context = Context.current().withCancellation();
    Context previous = context.attach();
    try {
      Iterator<GenerateResponse> stream = mesh.generate(request(prompt));
      while (stream.hasNext()) {
        GenerateResponse message = stream.next();
        Frame frame = message.getFrame();
        switch (frame.getContentCase()) {
          case TEXT:
            System.out.print(frame.getText().getText());
            System.out.flush();
            break;
          case MEDIA:
            save(message.getRequestId(), frame.getStage(), frame.getMedia());
            break;
          case PROGRESS:
            int step = frame.getProgress().getStep();
            System.err.printf("%s %d/%d%n", frame.getStage(), step, frame.getProgress().getTotalSteps());
            if (cancelAfter > 0 && step >= cancelAfter) {
              context.cancel(null);
            }
            break;
          default:
        }
      }
    } finally {
      context.detach(previous);
    }
  }

  private GenerateRequest request(String prompt) {
    DiffusionSamplingParams.Builder diffusion = DiffusionSamplingParams.newBuilder();
    if (flags.containsKey("seed")) {
      diffusion.setSeed(Long.parseLong(flags.get("seed")));
    }
    if (flags.containsKey("steps")) {
      diffusion.setNumInferenceSteps(Integer.parseInt(flags.get("steps")));
    }
    GenerateRequest.Builder request = GenerateRequest.newBuilder().setPrompt(Prompt.newBuilder().setText(prompt));
    if (flags.containsKey("seed") || flags.containsKey("steps")) {
      request.addSampling(StageSampling.newBuilder().setStage("painter")
          .setParams(SamplingParams.newBuilder().setDiffusion(diffusion)));
    }
    return request.build();
  }

  private void save(String requestId, String stage, MediaOutput media) throws IOException {
    String extension = media.getMimeType().substring(media.getMimeType().lastIndexOf('/') + 1);
    Path folder = Files.createDirectories(Path.of(flags.get("out")));
    Path path = folder.resolve(requestId + "-" + stage + "-" + media.getIndex() + "." + extension);
    Files.write(path, media.getData().toByteArray());
    System.out.printf("%nsaved %s%n", path);
  }

  /** Reads the reason (field 1) of the google.rpc.ErrorInfo, a message that Debian's packages do not bring. */
  private static String reason(StatusRuntimeException error) throws IOException {
    byte[] details = error.getTrailers() == null ? null : error.getTrailers().get(DETAILS);
    if (details == null) {
      return "";
    }
    try {
      for (com.google.protobuf.Any detail : Status.parseFrom(details).getDetailsList()) {
        if (detail.getTypeUrl().endsWith("google.rpc.ErrorInfo")) {
          com.google.protobuf.CodedInputStream input = detail.getValue().newCodedInput();
          return input.readTag() == 10 ? input.readString() : "";
        }
      }
    } catch (InvalidProtocolBufferException broken) {
      return "";
    }
    return "";
  }
}
