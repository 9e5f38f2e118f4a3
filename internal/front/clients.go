package front

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"
)

// Client is a user with a token of its own.
type Client struct {
	Name    string
	Role    string
	Token   string    // name of the token; may be empty
	Hash    string    // that the log has of the token
	Expires time.Time // of the token; zero: never
	Grant   Grant
}

// Clients knows clients by the digest of the token that they show. Its methods are called
// concurrently, and often: at each connection, and for each live session every
// [recheckEvery]. A session whose client is no longer known, or is known with another
// grant, is closed: the client connects again and has what it is granted then.
type Clients interface {
	// Of returns the client. The error is [ErrUnknown], [ErrRevoked] or [ErrExpired].
	Of(digest [sha256.Size]byte) (Client, error)
}

// The errors of [Clients.Of].
var (
	ErrUnknown = errors.New("the token is unknown")
	ErrRevoked = errors.New("the token was revoked")
	ErrExpired = errors.New("the token has expired")
)

// The server's own texts for clients that it no longer admits.
const (
	errRevoked = protocolError("User Authentication Revoked")
	errExpired = protocolError("User Authentication Expired")
)

// whyNot returns the text for a client with such an error.
func whyNot(err error) protocolError {
	switch {
	case errors.Is(err, ErrRevoked):
		return errRevoked
	case errors.Is(err, ErrExpired):
		return errExpired
	}
	return errAuthorization
}

// recheckEvery bounds how long a revoked client can append.
const recheckEvery = 250 * time.Millisecond

// shown is the token by which a session was admitted, and what it was granted.
type shown struct {
	door   Clients
	digest [sha256.Size]byte
	client Client
}

// ofToken returns the user whose token a client shows. From here on, the session ends when
// the token is revoked or expires.
func (s *session) ofToken(token string) (Client, error) {
	if s.door.Clients == nil || token == "" {
		return Client{}, ErrUnknown
	}
	digest := sha256.Sum256([]byte(token))
	client, err := s.door.Clients.Of(digest)
	if err != nil {
		return client, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.f.users[s] = shown{s.door.Clients, digest, client}
	return client, nil
}

// recheck closes the sessions of a door whose tokens were revoked, until stop is closed or
// the front is.
func (f *Front) recheck(door Clients, stop <-chan struct{}) {
	tick := time.NewTicker(recheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return
		case <-f.life.Done():
			return
		}
		f.mu.Lock()
		users := maps.Clone(f.users)
		f.mu.Unlock()
		for s, had := range users {
			if had.door != door {
				continue
			}
			now, err := door.Of(had.digest)
			switch {
			case err != nil:
				f.o.Logger.Info("client closed", "address", s.host, "user", had.client.Name, "why", err)
				f.all.Go(func() { s.dismiss(whyNot(err)) })
			case !now.same(had.client):
				f.o.Logger.Info("client closed: its token has other rights", "address", s.host, "user", had.client.Name)
				s.close()
			}
		}
	}
}

// farewell is how long a client has to take the reason of its end.
const farewell = recheckEvery

// dismiss tells the client the reason of its end, and ends the session.
func (s *session) dismiss(why protocolError) {
	defer time.AfterFunc(farewell, s.close).Stop()
	_ = s.sendError("%s", string(why)) // it ends in any case
	s.close()
}

// same reports whether two clients have one name and one grant.
func (c Client) same(o Client) bool {
	return c.Name == o.Name && c.Role == o.Role && c.Grant.Delete == o.Grant.Delete && c.Grant.Bytes == o.Grant.Bytes &&
		c.Grant.Access == o.Grant.Access && c.Grant.LogAlone == o.Grant.LogAlone &&
		(c.Grant.Runs == nil) == (o.Grant.Runs == nil) && slices.Equal(c.Grant.Runs, o.Grant.Runs)
}

// WhoSubject is where the front tells a client who it is. It is not a subject of the log.
const WhoSubject = "ckptstore.whoami"

// Who is a client as the front knows it.
type Who struct {
	Principal string    `json:"principal"` // of the events that it appends
	Role      string    `json:"role,omitempty"`
	Token     string    `json:"token,omitempty"` // name of the token
	Hash      string    `json:"hash,omitempty"`  // that the log has of the token
	Expires   time.Time `json:"expires,omitzero"`
	Append    bool      `json:"append"`         // events, leases
	Runs      []string  `json:"runs,omitempty"` // patterns of the runs for which it may append; without: all
	Delete    bool      `json:"delete"`         // checkpoints of runs whose lease it does not hold
	Access    bool      `json:"access"`         // record who was given access
	LogAlone  bool      `json:"log_alone"`      // it reads no leases and cursors, and has no cursor
}

// who tells the client who it is.
func (s *session) who(reply string) error {
	s.f.mu.Lock()
	client := s.f.users[s].client
	s.f.mu.Unlock()
	g := s.judge.grant
	text, err := json.Marshal(Who{
		Principal: s.principal.Name, Role: client.Role, Token: client.Token, Hash: client.Hash, Expires: client.Expires,
		Append: g.Runs == nil || len(g.Runs) > 0, Runs: g.Runs, Delete: g.Delete, Access: g.Access, LogAlone: g.LogAlone,
	})
	if err != nil {
		return err
	}
	return s.answer(reply, text)
}
