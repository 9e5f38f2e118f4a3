package front

import (
	"crypto/sha256"
	"maps"
	"slices"
	"time"
)

// Client is a user with a token of its own.
type Client struct {
	Name  string
	Grant Grant
}

// Clients knows clients by the digest of the token that they show. Its methods are called
// concurrently, and often: at each connection, and for each live session every
// [recheckEvery]. A session whose client is no longer known, or is known with another
// grant, is closed: the client connects again and has what it is granted then.
type Clients interface {
	Of(digest [sha256.Size]byte) (Client, bool)
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
// the token is revoked.
func (s *session) ofToken(token string) (Client, bool) {
	if s.door.Clients == nil || token == "" {
		return Client{}, false
	}
	digest := sha256.Sum256([]byte(token))
	client, ok := s.door.Clients.Of(digest)
	if !ok {
		return client, false
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.f.users[s] = shown{s.door.Clients, digest, client}
	return client, true
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
			if now, ok := door.Of(had.digest); !ok || !now.same(had.client) {
				f.o.Logger.Info("client closed: its token was revoked, or has other rights", "address", s.host, "user", had.client.Name)
				s.close()
			}
		}
	}
}

// same reports whether two clients have one name and one grant.
func (c Client) same(o Client) bool {
	return c.Name == o.Name && c.Grant.Delete == o.Grant.Delete && c.Grant.Bytes == o.Grant.Bytes &&
		(c.Grant.Runs == nil) == (o.Grant.Runs == nil) && slices.Equal(c.Grant.Runs, o.Grant.Runs)
}
