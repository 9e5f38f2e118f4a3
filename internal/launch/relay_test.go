package launch

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/ckptstore/ckptstore/internal/session/dedup"
)

// roundTrip is a function as a transport.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

var errBroken = errors.New("the connection broke")

// A relayed request is repeated with its body and number until it has a whole answer, or
// the session is over.
func TestRelayRepeats(t *testing.T) {
	t.Parallel()
	var numbers []string
	by := roundTrip(func(r *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(r.Body)
		if err != nil || string(body) != "text" {
			t.Errorf("body %q: %v", body, err)
		}
		switch numbers = append(numbers, r.Header.Get(dedup.Header)); len(numbers) {
		case 1:
			return nil, errBroken
		case 2:
			half := io.MultiReader(strings.NewReader("ans"), iotest.ErrReader(errBroken))
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(half)}, nil
		}
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("answer"))}, nil
	})
	over := make(chan struct{})
	relay := &repeating{by: by, over: over}
	ask := func() (*http.Response, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://node/v1/send", strings.NewReader("text"))
		if err != nil {
			t.Fatal(err)
		}
		return relay.RoundTrip(r) //nolint:bodyclose // it is in memory
	}
	response, err := ask()
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(response.Body); err != nil || string(text) != "answer" {
		t.Errorf("answer %q: %v", text, err)
	}
	if got := strings.Join(numbers, ", "); got != "1 1, 1 1, 1 1" {
		t.Errorf("numbers %s", got)
	}
	numbers = nil
	close(over)
	if _, err := ask(); !errors.Is(err, errBroken) {
		t.Errorf("error %v after the session", err)
	}
	if got := strings.Join(numbers, ", "); got != "2 2" {
		t.Errorf("numbers %s", got)
	}
}
