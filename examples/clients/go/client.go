// A StageMesh client in Go, made from the .proto files alone. See ../README.md for what it does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "stagemesh.dev/stagemesh/v1"
)

var (
	flags       = flag.NewFlagSet("client", flag.ExitOnError)
	head        = flags.String("head", "127.0.0.1:8470", "address of the head")
	out         = flags.String("out", ".", "folder for pictures")
	seed        = flags.Int64("seed", -1, "seed of the picture; -1 lets the mesh choose")
	steps       = flags.Int("steps", -1, "denoising steps; -1 is the stage's default")
	cancelAfter = flags.Int("cancel-after", 0, "cancel after that many steps; 0 never")
)

func main() {
	if len(os.Args) < 2 {
		fail(errors.New("usage: client list|generate [flags] [prompt]"))
	}
	flags.Parse(os.Args[2:])
	connection, err := grpc.Dial(*head, grpc.WithInsecure())
	if err != nil {
		fail(err)
	}
	defer connection.Close()
	mesh := pb.NewInferenceServiceClient(connection)
	switch os.Args[1] {
	case "list":
		err = list(mesh)
	case "generate":
		err = generate(mesh, strings.Join(flags.Args(), " "))
	default:
		err = fmt.Errorf("unknown command %q: use list or generate", os.Args[1])
	}
	if err != nil {
		fail(err)
	}
}

func list(mesh pb.InferenceServiceClient) error {
	answer, err := mesh.ListPipelines(context.Background(), &pb.ListPipelinesRequest{})
	if err != nil {
		return err
	}
	for _, pipeline := range answer.Pipelines {
		for _, stage := range pipeline.Stages {
			fmt.Printf("%s/%s %s %d/%d\n", pipeline.Name, stage.Name, stage.StageType, stage.ReadyReplicas, stage.TargetReplicas)
		}
	}
	return nil
}

func generate(mesh pb.InferenceServiceClient, prompt string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := mesh.Generate(ctx, request(prompt))
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		frame := message.GetFrame()
		switch content := frame.GetContent().(type) {
		case *pb.Frame_Text:
			fmt.Print(content.Text.Text)
		case *pb.Frame_Progress:
			fmt.Fprintf(os.Stderr, "%s %d/%d\n", frame.Stage, content.Progress.Step, content.Progress.TotalSteps)
			if *cancelAfter > 0 && int(content.Progress.Step) >= *cancelAfter {
				cancel()
			}
		case *pb.Frame_Media:
			if err := save(message.RequestId, frame.Stage, content.Media); err != nil {
				return err
			}
		}
	}
}

func request(prompt string) *pb.GenerateRequest {
	request := &pb.GenerateRequest{Prompt: &pb.Prompt{Content: &pb.Prompt_Text{Text: prompt}}}
	diffusion := &pb.DiffusionSamplingParams{}
	if *seed >= 0 {
		diffusion.Seed = seed
	}
	if *steps >= 0 {
		count := uint32(*steps)
		diffusion.NumInferenceSteps = &count
	}
	if *seed >= 0 || *steps >= 0 {
		params := &pb.SamplingParams{Params: &pb.SamplingParams_Diffusion{Diffusion: diffusion}}
		request.Sampling = []*pb.StageSampling{{Stage: "painter", Params: params}}
	}
	return request
}

func save(requestID, stage string, media *pb.MediaOutput) error {
	extension := media.MimeType[strings.LastIndex(media.MimeType, "/")+1:]
	path := filepath.Join(*out, fmt.Sprintf("%s-%s-%d.%s", requestID, stage, media.Index, extension))
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, media.Data, 0o644); err != nil {
		return err
	}
	fmt.Printf("\nsaved %s\n", path)
	return nil
}

// fail prints a typed error of the mesh, or any other, and ends the program.
func fail(err error) {
	answer, isStatus := status.FromError(err)
	if !isStatus {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if answer.Code() == codes.Canceled {
		fmt.Println("\ncancelled")
		os.Exit(3)
	}
	reason := ""
	for _, detail := range answer.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			reason = info.Reason
		}
	}
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", answer.Code(), reason, answer.Message())
	os.Exit(2)
}
