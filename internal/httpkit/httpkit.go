// Package httpkit holds the parts of every server of JSON requests: it reads a
// body within a limit, decodes it, answers, refuses with problem details (RFC
// 9457), and checks tokens.
//
//	Handle      a handler from a function on decoded requests
//	Read        the body within a limit; Decode reads its JSON
//	Reply       writes an answer
//	Refuse      writes an error: its status is that of its kind, see package problem
//	Authorized  compares the bearer token in constant time
//	TakesGzip   reads the header Accept-Encoding
package httpkit

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
)

// The content types.
const (
	JSON    = "application/json"
	Problem = "application/problem+json"
)

// Details is the body of every refusal: problem details with two more members.
type Details struct {
	Type   string       `json:"type"`   // a URI of the kind
	Title  string       `json:"title"`  // the kind in words
	Status int          `json:"status"` // of the reply
	Detail string       `json:"detail"` // what failed, on what, and what to do
	Kind   problem.Kind `json:"kind"`
	// Message is Detail, under its name in the worker protocol.
	Message string `json:"error"`
}

// typeOf is the prefix of the problem types.
const typeOf = "tag:ckptstore,2026:problem/"

// DetailsOf returns the body of an error's refusal.
func DetailsOf(err error) Details {
	kind, text := system.KindOf(err), err.Error()
	return Details{Type: typeOf + string(kind), Title: kind.Title(), Status: kind.Status(), Detail: text, Kind: kind, Message: text}
}

// Refuse answers a request with an error.
func Refuse(w http.ResponseWriter, err error) {
	d := DetailsOf(err)
	body, _ := json.Marshal(d) // strings and a number always encode
	w.Header().Set("Content-Type", Problem)
	w.WriteHeader(d.Status)
	_, _ = w.Write(body) // a disconnected client needs no answer
}

// Read returns the body of a request. A body of more than limit bytes or a
// truncated one is the caller's fault.
func Read(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if large := (*http.MaxBytesError)(nil); errors.As(err, &large) {
		return nil, problem.Errorf(problem.Invalid, "read request: %w; send at most %d bytes", err, large.Limit)
	}
	if err != nil {
		return nil, problem.Errorf(problem.Invalid, "read request: %w; send the whole body", err)
	}
	return body, nil
}

// Decode decodes the body of a request.
func Decode[In any](body []byte) (in In, err error) {
	if err := json.Unmarshal(body, &in); err != nil {
		return in, problem.Errorf(problem.Invalid, "decode request: %w; send one JSON object, with the members of docs/reference/protocol.md", err)
	}
	return in, nil
}

// Request reads and decodes the body of a request.
func Request[In any](w http.ResponseWriter, r *http.Request, limit int64) (in In, err error) {
	body, err := Read(w, r, limit)
	if err != nil {
		return in, err
	}
	return Decode[In](body)
}

// Reply answers a request in JSON. An error means that the caller did not get the
// answer.
func Reply(w http.ResponseWriter, out any) error {
	body, err := json.Marshal(out)
	if err != nil {
		err = fmt.Errorf("encode the reply: %w", err)
		Refuse(w, err)
		return err
	}
	w.Header().Set("Content-Type", JSON)
	_, err = w.Write(body)
	return err
}

// Handle returns a handler with JSON on both sides. It limits request bodies to
// limit bytes.
func Handle[In, Out any](limit int64, do func(context.Context, In) (Out, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in, err := Request[In](w, r, limit)
		var out Out
		if err == nil {
			out, err = do(r.Context(), in)
		}
		if err != nil {
			Refuse(w, err)
			return
		}
		_ = Reply(w, out) // a disconnected client needs no answer
	})
}

// Authorized reports whether a request bears the token. It takes the same time
// for all wrong tokens of one length. An empty token is never accepted.
func Authorized(r *http.Request, token string) bool {
	return token != "" && subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), []byte("Bearer "+token)) == 1
}

// TakesGzip reports whether a client accepts gzip, by its header Accept-Encoding.
func TakesGzip(accepts string) bool {
	takes := false
	for one := range strings.SplitSeq(accepts, ",") {
		name, parameter, _ := strings.Cut(one, ";")
		name = strings.ToLower(strings.TrimSpace(name))
		if name != "gzip" && name != "*" {
			continue
		}
		quality, found := strings.CutPrefix(strings.ToLower(strings.ReplaceAll(parameter, " ", "")), "q=")
		q, err := strconv.ParseFloat(quality, 64)
		takes = !found || err == nil && q > 0
		if name == "gzip" {
			return takes // it counts more than *
		}
	}
	return takes
}
