package rpc

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"
)

// greeting opens a connection, in three messages: the caller's, the answer with
// the listener's proof, and the caller's proof. Each proof is an HMAC of the
// token over both nonces and the prover's message. So neither side reveals the
// token to an impostor, and no message can be replayed.
type greeting struct {
	Version int    `json:"version"`
	Peer    Peer   `json:"peer"`
	Session string `json:"session,omitempty"` // of the caller, common to its connections
	Channel int    `json:"channel"`           // index of this connection
	Of      int    `json:"of"`                // number of connections
	Nonce   []byte `json:"nonce"`
	Proof   []byte `json:"proof,omitempty"`
	Error   string `json:"error,omitempty"`
}

const (
	version     = 1
	nonceBytes  = 16
	maxChannels = 64
)

var errToken = errors.New("the token is wrong: both sides need the same one")

func (g greeting) prove(token, role string, other []byte) []byte {
	g.Proof = nil
	text, _ := json.Marshal(g) // strings, numbers and bytes always encode
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte(role))
	mac.Write(other)
	mac.Write(text)
	return mac.Sum(nil)
}

func (g greeting) proved(token, role string, other []byte) bool {
	return hmac.Equal(g.Proof, g.prove(token, role, other))
}

func sendGreeting(c net.Conn, g greeting) error {
	text, err := json.Marshal(g)
	if err != nil {
		return err
	}
	_, err = c.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...))
	return err
}

func readGreeting(c net.Conn) (g greeting, err error) {
	text, err := readSized(c, maxGreeting)
	if err != nil {
		return g, err
	}
	if err := json.Unmarshal(text, &g); err != nil {
		return g, fmt.Errorf("invalid greeting: %w", err)
	}
	if g.Error != "" {
		return g, errors.New(g.Error)
	}
	if g.Version != version {
		return g, fmt.Errorf("it speaks version %d of the rpc protocol, this side %d: upgrade the older of the two", g.Version, version)
	}
	if len(g.Nonce) != nonceBytes {
		return g, fmt.Errorf("a nonce of %d bytes, want %d", len(g.Nonce), nonceBytes)
	}
	return g, nil
}

func nonce() []byte {
	b := make([]byte, nonceBytes)
	_, _ = rand.Read(b) // never fails
	return b
}

// greet is the caller's side: it sends g and returns the listener's greeting.
func greet(c net.Conn, token string, g greeting) (greeting, error) {
	_ = c.SetDeadline(time.Now().Add(handshakeTimeout))
	g.Version, g.Nonce = version, nonce()
	if err := sendGreeting(c, g); err != nil {
		return greeting{}, err
	}
	there, err := readGreeting(c)
	if err != nil {
		return greeting{}, err
	}
	if !there.proved(token, "listener", g.Nonce) {
		return greeting{}, errToken
	}
	g.Proof = g.prove(token, "caller", there.Nonce)
	if err := sendGreeting(c, g); err != nil {
		return greeting{}, err
	}
	// The listener confirms the proof.
	if _, err := readGreeting(c); err != nil {
		return greeting{}, err
	}
	return there, c.SetDeadline(time.Time{})
}

// welcome is the listener's side.
func welcome(c net.Conn, token string, self Peer) (greeting, error) {
	_ = c.SetDeadline(time.Now().Add(handshakeTimeout))
	refuse := func(err error) (greeting, error) {
		_ = sendGreeting(c, greeting{Error: err.Error()}) // it may be gone
		return greeting{}, err
	}
	first, err := readGreeting(c)
	if err != nil {
		return greeting{}, err
	}
	if first.Of < 1 || first.Of > maxChannels || first.Channel < 0 || first.Channel >= first.Of || first.Session == "" {
		return refuse(fmt.Errorf("channel %d of %d does not exist", first.Channel, first.Of))
	}
	mine := greeting{Version: version, Peer: self, Nonce: nonce()}
	mine.Proof = mine.prove(token, "listener", first.Nonce)
	if err := sendGreeting(c, mine); err != nil {
		return greeting{}, err
	}
	there, err := readGreeting(c)
	if err != nil {
		return greeting{}, err
	}
	if !there.proved(token, "caller", mine.Nonce) {
		return refuse(errToken)
	}
	if there.Session != first.Session || there.Channel != first.Channel || there.Of != first.Of {
		return refuse(errors.New("it changed its mind in the middle of the greeting"))
	}
	if err := sendGreeting(c, mine); err != nil {
		return greeting{}, err
	}
	return there, c.SetDeadline(time.Time{})
}
