package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/rpc"
)

// The trainer calls a worker by RPC: through a TENSORPIPE agent on the unix
// socket [EnvRPC], with the name [AgentName] and the token [EnvToken].
const (
	// FunctionStacks returns the stacks of all goroutines, as text.
	FunctionStacks = "stacks"
	// TrainerAgent is the name of the trainer's agent.
	TrainerAgent = "trainer"
)

// AgentName returns the name of a rank's agent.
func AgentName(rank int) string { return "rank" + strconv.Itoa(rank) }

// Bounds of the text of stacks.
const (
	firstStacks = 64 << 10
	mostStacks  = 4 << 20
)

// serveRPC opens this worker's agent. It opens none if the trainer gave no address,
// or if an earlier Connect of this rank holds the socket and serves the calls.
func (c *Client) serveRPC() error {
	address := os.Getenv(EnvRPC)
	if address == "" {
		return nil
	}
	agent, err := rpc.NewPipe(rpc.PipeConfig{
		Self: rpc.Peer{Name: AgentName(c.Rank), Rank: c.Rank}, Network: "unix", Address: address, Token: c.token,
	})
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("serve the trainer's calls at %s (unset %s to do without): %w", address, EnvRPC, err)
	}
	c.agent = agent
	return agent.Handle(FunctionStacks, func(context.Context, []byte) ([]byte, error) { return goroutines(), nil })
}

// goroutines returns the stacks of all goroutines, cut at mostStacks. The runtime
// lists the calling goroutine first; goroutines moves it to the end.
func goroutines() []byte {
	for size := firstStacks; ; size *= 4 {
		buf := make([]byte, min(size, mostStacks))
		if n := runtime.Stack(buf, true); n < len(buf) || len(buf) == mostStacks {
			own, others, more := bytes.Cut(buf[:n], []byte("\n\n"))
			if !more {
				return own
			}
			return slices.Concat(bytes.TrimSpace(others), []byte("\n\n"), own, []byte("\n"))
		}
	}
}

// Heartbeat reports that this rank is alive, for trainers that restart a group
// when a rank is silent for too long. Every other request counts as a heartbeat, so
// call it only during long work without one. Do not call it from a separate
// goroutine, which would continue when the training hangs.
func (c *Client) Heartbeat(ctx context.Context) error {
	return c.call(ctx, "heartbeat", struct{}{}, nil)
}
