package query

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// Client queries the server of a store's owner.
type Client struct {
	http *http.Client
	last func(context.Context) (uint64, error)
}

var _ Source = (*Client)(nil)

// NewClient returns a client. dial connects to the current owner of the store;
// last returns the sequence of the log's end.
func NewClient(dial func(context.Context) (net.Conn, error), last func(context.Context) (uint64, error)) *Client {
	return &Client{
		http: &http.Client{Transport: &http.Transport{
			DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableKeepAlives: true, // the next query may go to another owner
		}},
		last: last,
	}
}

// ErrUnreachable reports that the owner did not answer, or not completely. The
// query may be retried.
var ErrUnreachable = errors.New("the owner of the store cannot be asked")

// sentinels are the errors that callers test for, by their kind on the wire.
var sentinels = map[problem.Kind]error{
	problem.NotFound:     projections.ErrNotFound,
	problem.Ambiguous:    projections.ErrAmbiguous,
	problem.BadReference: projections.ErrReference,
	problem.Newer:        events.ErrNewer,
	problem.Late:         context.DeadlineExceeded,
}

// answerError is a server's error with its kind and identity there.
type answerError struct {
	message string
	kind    problem.Kind
}

func (e *answerError) Error() string             { return e.message }
func (e *answerError) Unwrap() error             { return sentinels[e.kind] }
func (e *answerError) ProblemKind() problem.Kind { return e.kind }

// Answer implements [Source].
func (c *Client) Answer(ctx context.Context, query string, p Params) (json.RawMessage, error) {
	seq, err := c.last(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://store/v1/"+query+"?"+p.encode(seq), nil)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", query, err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("%w: read the answer to %s: %w", ErrUnreachable, query, err)
	}
	if resp.StatusCode == http.StatusOK {
		return body, nil
	}
	var d httpkit.Details
	if err := json.Unmarshal(body, &d); err != nil {
		return nil, fmt.Errorf("ask %s: %s", query, resp.Status)
	}
	return nil, &answerError{d.Message, d.Kind}
}
