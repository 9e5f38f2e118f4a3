package nodes

import (
	"encoding/json"
	"time"
)

// Headers of the requests.
const (
	sessionHeader = "Ckptstore-Session"
	// retryHeader is on a Conflict that may end by itself: it holds the time after which
	// it has ended if the other node is dead.
	retryHeader = "Ckptstore-Retry-Within"
)

// relayPrefix begins the paths of relayed requests.
const relayPrefix = "/relay"

// Limits of requests and answers.
const (
	smallBody  = 64 << 10 // of beats and orders
	maxBody    = 4 << 20  // of one command or message
	maxBatch   = 4 << 20  // of several: a batch ends after the body that exceeds it
	batchBody  = 16 << 20 // of a request or answer with a batch
	maxWelcome = 8 << 20

	maxCommands = 1 << 16 // that one node has not acknowledged
	maxEvents   = 1 << 16 // that the caller has not taken, before messages must wait
)

// longPoll is how long the coordinator holds a request for commands.
const longPoll = 10 * time.Second

// jobInfo is the answer to agents that have not shown a token.
type jobInfo struct {
	Job      string `json:"job"`
	Protocol int    `json:"protocol"`
	Version  string `json:"version"`
	Shared   bool   `json:"shared"`          // the token is in a file of a shared directory
	Proof    string `json:"proof,omitempty"` // see proof; answers the agent's nonce
}

type joinRequest struct {
	Protocol int    `json:"protocol"`
	Session  string `json:"session"`
	Node     Node   `json:"node"`
}

type joinAnswer struct {
	Index    int             `json:"index"`
	Timeout  time.Duration   `json:"timeout"`
	Welcome  json.RawMessage `json:"welcome,omitempty"`
	Warnings []string        `json:"warnings,omitempty"`
}

type beatRequest struct {
	Port int `json:"port,omitempty"`
}

type nextRequest struct {
	After uint64 `json:"after"` // the last command that the agent has
}

type nextAnswer struct {
	First    uint64    `json:"first,omitempty"` // number of the first command
	Commands []Command `json:"commands,omitempty"`
	Ended    *ended    `json:"ended,omitempty"` // the last words of the coordinator
}

// ended is the end of the job.
type ended struct {
	Reason string `json:"reason"`
	Code   int    `json:"code"`
}

type tellRequest struct {
	First    uint64    `json:"first"` // number of the first message
	Messages []message `json:"messages"`
	Port     int       `json:"port,omitempty"`
}

type message struct {
	Kind string          `json:"kind"`
	Body json.RawMessage `json:"body,omitempty"`
}

type tellAnswer struct {
	Heard uint64 `json:"heard"` // number of the last message that was received
}

type leaveRequest struct {
	Reason string `json:"reason"`
}

// nothing is the body of an answer without content.
type nothing struct{}

// batch returns the first values that fit into one request: at least one.
func batch[T any](values []T, size func(T) int) []T {
	total := 0
	for i, v := range values {
		if total += size(v); total > maxBatch {
			return values[:i+1]
		}
	}
	return values
}

// encode encodes the body of a command or message.
func encode(body any) (json.RawMessage, error) {
	data, err := json.Marshal(body)
	if err == nil && len(data) > maxBody {
		err = tooLarge(len(data))
	}
	return data, err
}
