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

// RPC is how the trainer calls a worker: an agent of TENSORPIPE on the unix
// socket [EnvRPC], named by [AgentName], whose token is [EnvToken].
const (
	// FunctionStacks gives the stacks of all goroutines, as text.
	FunctionStacks = "stacks"
	// TrainerAgent is the name of the trainer's agent.
	TrainerAgent = "trainer"
)

// AgentName is the name of a rank's agent.
func AgentName(rank int) string { return "rank" + strconv.Itoa(rank) }

// Bounds of what stacks gives.
const (
	firstStacks = 64 << 10
	mostStacks  = 4 << 20
)

// serveRPC opens this worker's agent. It is nil when the trainer gave no address,
// or when the socket is taken: by an earlier Connect of this rank, whose process
// then speaks for it.
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

// goroutines are the stacks of all goroutines, cut at mostStacks. The one that
// asks comes first from the runtime, and goes last.
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

// Heartbeat says that this rank is alive, where the trainer restarts a group
// with a rank that is silent for too long. Every other request says so too: it
// is for work that takes long between them, and not for a goroutine of its own,
// which goes on when the training hangs.
func (c *Client) Heartbeat(ctx context.Context) error {
	return c.call(ctx, "heartbeat", struct{}{}, nil)
}
