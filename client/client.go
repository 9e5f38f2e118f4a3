// Package client is the Go library for workers, the processes that train. A
// trainer starts each worker and passes it a socket in its environment.
//
//	c, err := client.Connect(ctx)
//	if c.Resume != "" { _, err = c.Load(ctx, items, client.LoadOptions{}) }
//	for … {
//		err = c.Report(ctx, step, map[string]any{"loss": loss})
//		s, err := c.Save(ctx, step, items, client.SaveOptions{})
//		…
//		err = s.Wait(ctx, client.Committed)
//	}
//
// A save returns once the bytes are copied into shared memory; the trainer
// then makes them durable. Package client depends only on the standard library
// and on packages of this module that do the same.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/rpc"
)

// Client is one rank's connection to its trainer. Its methods are safe for
// concurrent use, but every rank must call collectives in the same order.
type Client struct {
	Context
	http  *http.Client
	token string
	seq   atomic.Uint64
	plans plans
	maps  mappings
	stop  atomic.Value // string: the trainer's newest stop request
	enc   encoding
	agent *rpc.Pipe // serves the trainer's calls; may be nil

	messages messages

	ownSignals bool
	signals    signalHold
}

// ErrNoTrainer means that no trainer started this process.
var ErrNoTrainer = errors.New("no trainer: " + EnvSocket + " is not set; start this program with `trainer run -- COMMAND`")

// helloTimeout bounds the first request: the trainer's backend may hold its
// reply until all ranks have sent theirs. Later requests are bounded only by
// their context.
const helloTimeout = 15 * time.Minute

// Connect opens the connection to the trainer that started this process. It
// returns [ErrNoTrainer] if there is none. From then on SIGTERM and SIGUSR1 ask the
// trainer to stop the job instead of ending this process: see [WithOwnSignals].
func Connect(ctx context.Context, opts ...Option) (*Client, error) {
	socket := os.Getenv(EnvSocket)
	if socket == "" {
		return nil, ErrNoTrainer
	}
	var d net.Dialer
	c := &Client{
		token: os.Getenv(EnvToken),
		http: &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return d.DialContext(ctx, "unix", socket)
			},
			MaxIdleConnsPerHost: 4,
		}},
	}
	for _, set := range opts {
		set(c)
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	if err := c.call(ctx, "hello", Hello{Protocols: []int{Protocol}, PID: os.Getpid()}, &c.Context); err != nil {
		return nil, err
	}
	if err := c.serveRPC(); err != nil {
		return nil, err
	}
	c.holdSignals(socket)
	return c, nil
}

// Close closes idle connections, unmaps the staging slots, and restores the
// handling of SIGTERM and SIGUSR1. It does not notify the trainer, which watches
// the process itself.
func (c *Client) Close() {
	c.endSignals()
	if c.agent != nil {
		_ = c.agent.Close() // a leftover socket is removed with the job's directory
	}
	c.maps.close()
	c.http.CloseIdleConnections()
}

// Report sends one iteration's metrics to the trainer and blocks until the
// trainer has those of every rank. [Client.StopRequested] then returns the same
// request on all ranks. Values are numbers, strings or booleans. They take at most
// 64 KiB as JSON, less with more than 15 ranks; above that the trainer returns an
// [Error] with status 400. While the log does not answer or is full, Report
// returns before the metrics are logged, and blocks once too many are queued. The
// metric [BusyThisIter] finds slow nodes.
func (c *Client) Report(ctx context.Context, step int64, metrics map[string]any) error {
	return c.report(ctx, step, metrics, false)
}

// ReportLast is [Client.Report] for the last iteration of the training. The
// trainer refuses any later report of this rank.
func (c *Client) ReportLast(ctx context.Context, step int64, metrics map[string]any) error {
	return c.report(ctx, step, metrics, true)
}

func (c *Client) report(ctx context.Context, step int64, metrics map[string]any, last bool) error {
	metrics, err := c.enc.apply(metrics)
	if err != nil {
		return fmt.Errorf("report: encode the metrics of step %d: %w", step, err)
	}
	safe := make(map[string]any, len(metrics))
	for k, v := range metrics {
		safe[k] = finite(v)
	}
	var reply ReportReply
	err = c.call(ctx, "report", Report{Step: step, Metrics: safe, Done: last}, &reply)
	if err == nil {
		c.heard(reply.Stop)
	}
	return err
}

// finite replaces floats that JSON cannot represent with their names.
func finite(v any) any {
	f, ok := v.(float64)
	if f32, is := v.(float32); is {
		f, ok = float64(f32), true
	}
	switch {
	case !ok:
		return v
	case f != f:
		return "NaN"
	case f > maxFloat:
		return "Infinity"
	case f < -maxFloat:
		return "-Infinity"
	}
	return f
}

const maxFloat = 0x1p1023 * (1 + (1 - 0x1p-52))

// call posts a JSON request and decodes the reply into out, unless out is nil.
func (c *Client) call(ctx context.Context, what string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("%s: encode request: %w", what, err)
	}
	reply, err := c.post(ctx, what, body, nil)
	if err != nil {
		return err
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(reply, out); err != nil {
		return fmt.Errorf("%s: decode the trainer's reply: %w", what, err)
	}
	return nil
}

func (c *Client) post(ctx context.Context, what string, body []byte, header map[string]string) ([]byte, error) {
	reply, _, err := c.ask(ctx, what, body, header)
	return reply, err
}

// ask is post for callers that need the reply's headers.
func (c *Client) ask(ctx context.Context, what string, body []byte, header map[string]string) ([]byte, http.Header, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://trainer/v1/"+what, bytes.NewReader(body))
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", what, err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := c.http.Do(req)
	if ctx.Err() != nil && err != nil {
		return nil, nil, fmt.Errorf("%s: %w", what, context.Cause(ctx)) // the caller's doing, not the trainer's
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s: the trainer does not answer: %w", what, err)
	}
	defer func() { _ = resp.Body.Close() }()
	reply, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: read the trainer's reply: %w", what, err)
	}
	if resp.StatusCode == http.StatusOK {
		return reply, resp.Header, nil
	}
	var p Problem
	if json.Unmarshal(reply, &p) != nil || p.Message == "" {
		p.Message = fmt.Sprintf("%s: %.200q", resp.Status, reply)
	}
	return nil, nil, &Error{Op: what, Status: resp.StatusCode, Message: p.Message}
}

// ErrNoSpace means that the trainer refused a request because a disk or shared
// memory is full; the message names which. Test with errors.Is.
var ErrNoSpace = errors.New("no space")

// Error is the trainer's refusal of a request.
type Error struct {
	Op      string // such as "save"
	Status  int    // HTTP status; see the protocol
	Message string
}

func (e *Error) Error() string { return e.Op + ": " + e.Message }

// ErrBusy means that a save failed because earlier saves hold all staging slots
// and the trainer is configured not to wait for one. Test with errors.Is.
var ErrBusy = errors.New("no staging slot is free")

// Is matches [ErrNoSpace] and [ErrBusy] by the status of the error.
func (e *Error) Is(target error) bool {
	return target == ErrNoSpace && e.Status == http.StatusInsufficientStorage ||
		target == ErrBusy && e.Status == http.StatusServiceUnavailable
}

// Option changes how a worker connects.
type Option func(*Client)

// WithEncoding passes a copy of each report's metrics through encode and sends
// the result. Use EncodeData of the group's backend: the trainer decodes reports
// with that backend's DecodeData.
func WithEncoding(encode func(metrics map[string]any) (map[string]any, error)) Option {
	return func(c *Client) { c.enc = encode }
}

// encoding transforms metrics before they are sent; nil leaves them unchanged.
type encoding func(map[string]any) (map[string]any, error)

func (e encoding) apply(metrics map[string]any) (map[string]any, error) {
	if e == nil {
		return metrics, nil
	}
	return e(maps.Clone(metrics))
}
