package nodes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Tunnel returns a handler of [Link.Dial]: it connects each caller with what dial
// returns, until one of both ends.
func Tunnel(dial func(*http.Request) (net.Conn, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := dial(r)
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		defer func() { _ = conn.Close() }()
		defer context.AfterFunc(r.Context(), func() { _ = conn.Close() })()
		control := http.NewResponseController(w)
		if err := errors.Join(ignoreUnsupported(control.EnableFullDuplex()), control.Flush()); err != nil {
			return // the caller is gone
		}
		go func() {
			_, _ = io.Copy(conn, r.Body) // until the caller or the handler ends
			_ = conn.Close()
		}()
		_, _ = io.Copy(flushing{w, control}, conn)
	})
}

// ignoreUnsupported passes errors on, but not of HTTP/2, which is always full duplex.
func ignoreUnsupported(err error) error {
	if errors.Is(err, http.ErrNotSupported) {
		return nil
	}
	return err
}

// flushing sends what is written at once.
type flushing struct {
	io.Writer
	control *http.ResponseController
}

// Write implements [io.Writer].
func (f flushing) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	if err == nil {
		err = f.control.Flush()
	}
	return n, err
}

// refused returns the problem in a response, and closes it.
func refused(response *http.Response) error {
	defer func() { _ = response.Body.Close() }()
	of := &refusal{}
	body, err := io.ReadAll(io.LimitReader(response.Body, smallBody))
	if err == nil {
		err = json.Unmarshal(body, &of.Details)
	}
	if err != nil || of.Detail == "" {
		return fmt.Errorf("%w: status %s", errForeign, response.Status)
	}
	return of
}

// Dial connects to the [Tunnel] at a path of the endpoint. ctx bounds the connecting
// only.
func (l *Link) Dial(ctx context.Context, path string) (net.Conn, error) {
	near, far := net.Pipe()
	life, end := context.WithCancel(l.ctx)
	stop := context.AfterFunc(ctx, end)
	r, err := http.NewRequestWithContext(life, http.MethodPost, l.URL(path), far) // the transport closes far
	var response *http.Response
	if err == nil {
		response, err = l.Client().Do(r)
	}
	if err == nil && response.StatusCode != http.StatusOK {
		err = refused(response)
	}
	if !stop() && err == nil {
		err = errors.Join(context.Cause(ctx), response.Body.Close())
	}
	if err != nil {
		end()
		_ = far.Close() // of a pipe
		return nil, fmt.Errorf("connect to %s at the endpoint: %w", path, err)
	}
	go func() {
		_, _ = io.Copy(far, response.Body) // until one of both ends
		_ = far.Close()
		_ = response.Body.Close()
		end()
	}()
	return near, nil
}

// Request sends one request to a path of the endpoint and decodes its answer.
func (l *Link) Request(ctx context.Context, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("ask the coordinator: %w", err)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, l.URL(path), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("ask the coordinator: %w", err)
	}
	response, err := l.Client().Do(r)
	if err != nil {
		return fmt.Errorf("ask the coordinator: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		err := refused(response)
		if of := (*refusal)(nil); errors.As(err, &of) {
			err = problem.Wrap(of.Kind, of) // of the caller's peer, so it is final
		}
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if err := json.NewDecoder(response.Body).Decode(out); err != nil {
		return fmt.Errorf("ask the coordinator: %w", err)
	}
	return nil
}

// Self returns the coordinator's own node.
func (e *Endpoint) Self() Node {
	for _, m := range e.Members() {
		if m.Key == e.c.Self.Key {
			return m.Node
		}
	}
	return e.c.Self
}

// Timeout returns T.
func (e *Endpoint) Timeout() time.Duration { return e.timeout }

// Max returns the most nodes of a group.
func (e *Endpoint) Max() int { return e.c.Max }
