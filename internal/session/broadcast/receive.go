package broadcast

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Peer is where another node passes blocks on.
type Peer struct {
	URL    string // without a path
	Client *http.Client
}

// smallBody bounds the body of a refusal.
const smallBody = 64 << 10

var errSilent = errors.New("the node was silent for too long")

// Receive takes the blocks that another node passes on to this one in a load, and calls take for
// each frame, whose data it does not keep. It returns nil when it has got all. Its error is that
// of take, of the connection, or of a node that is silent.
func Receive(ctx context.Context, from Peer, attempt, load, node int, limits Limits, take func(Frame) error) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	quiet := time.AfterFunc(limits.Silent, func() { stop(errSilent) })
	defer quiet.Stop()
	defer from.Client.CloseIdleConnections()
	err := receive(ctx, from, fmt.Sprintf("%s%d/%d/%d", Path, attempt, load, node), func() { quiet.Reset(limits.Silent) }, func(f Frame) error {
		quiet.Stop() // the time of take is not the sender's
		defer quiet.Reset(limits.Silent)
		return take(f)
	})
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func receive(ctx context.Context, from Peer, path string, heard func(), take func(Frame) error) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, from.URL+path, nil)
	if err != nil {
		return err
	}
	reply, err := from.Client.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		return refusal(reply)
	}
	heard()
	in := bufio.NewReaderSize(reply.Body, 256<<10)
	buf := make([]byte, MaxFrame)
	head := make([]byte, headerSize)
	for {
		if _, err := io.ReadFull(in, head); err != nil {
			return fmt.Errorf("the stream ends too early: %w", err)
		}
		rank, size, number := header(head)
		switch {
		case size == 0 && number == signalEnd:
			return nil
		case size == 0:
			heard()
			continue
		case size > MaxFrame:
			return problem.Errorf(problem.Foreign, "a frame of %d bytes", size)
		}
		if _, err := io.ReadFull(in, buf[:size]); err != nil {
			return fmt.Errorf("the stream ends too early: %w", err)
		}
		if err := take(Frame{Rank: rank, Block: number, Data: buf[:size]}); err != nil {
			return err
		}
	}
}

// refusal returns the error of an answer.
func refusal(reply *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(reply.Body, smallBody))
	if err != nil {
		return err
	}
	var of httpkit.Details
	if json.Unmarshal(data, &of) != nil || of.Detail == "" {
		return fmt.Errorf("the answer is not that of a trainer: status %s", reply.Status)
	}
	return problem.Errorf(of.Kind, "%s", of.Detail)
}
