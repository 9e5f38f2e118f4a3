package jetlog

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"sync/atomic"

	"github.com/nats-io/nats-server/v2/server"
)

// doorman decides who is let in, and as which user. A connection through the
// process or a unix socket is let in: the socket's mode has decided. A
// connection over TCP shows the token. Client certificates are checked by TLS
// before this. Only the owner's own connection, which shows a secret that never
// leaves the process, may change the streams behind the log.
type doorman struct {
	account *server.Account
	owner   string             // secret of the owner's own connection
	token   *[sha256.Size]byte // digest of the clients' token; nil asks for none
	closed  atomic.Bool        // over TCP nobody is let in any more
}

var _ server.Authentication = (*doorman)(nil)

func newDoorman(o *Listen) *doorman {
	d := &doorman{owner: rand.Text()}
	if o != nil && o.Token != "" {
		sum := sha256.Sum256([]byte(o.Token))
		d.token = &sum
	}
	return d
}

// Check implements [server.Authentication].
func (d *doorman) Check(c server.ClientAuthentication) bool {
	from := c.RemoteAddress()
	if c.Kind() != server.CLIENT || from == nil {
		return false
	}
	shown := c.GetOpts().Token
	if from.Network() == "pipe" {
		if shown != "" && subtle.ConstantTimeCompare([]byte(shown), []byte(d.owner)) == 1 {
			c.RegisterUser(&server.User{Username: "owner", Account: d.account})
			return true
		}
		c.RegisterUser(d.client())
		return true
	}
	if d.closed.Load() {
		return false
	}
	if d.token != nil {
		// Digests have one length: the time tells nothing of the token's.
		got := sha256.Sum256([]byte(shown))
		if subtle.ConstantTimeCompare(got[:], d.token[:]) != 1 {
			return false
		}
	}
	c.RegisterUser(d.client())
	return true
}

// client is a user who may append and read, and nothing else.
func (d *doorman) client() *server.User {
	return &server.User{Username: "client", Account: d.account, Permissions: &server.Permissions{
		Publish: &server.SubjectPermission{Deny: destructive},
	}}
}

// destructive are the requests that could change the log, the leases or the
// cursors behind the back of their events, whatever streams there are. No client
// of this package makes them.
var destructive = []string{
	"$JS.API.STREAM.UPDATE.*",
	"$JS.API.STREAM.DELETE.*",
	"$JS.API.STREAM.PURGE.*",
	"$JS.API.STREAM.RESTORE.*",
	"$JS.API.STREAM.MSG.DELETE.*",
	"$JS.API.STREAM.PEER.REMOVE.*",
}
