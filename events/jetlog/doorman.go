package jetlog

import (
	"crypto/rand"
	"crypto/subtle"

	"github.com/nats-io/nats-server/v2/server"
)

// doorman decides as which user a connection is let in. All come through the
// process: those of clients by a front, or by a unix socket, whose mode has
// decided. Only the owner's own connection, which shows a secret that never leaves
// the process, may change the streams behind the log.
type doorman struct {
	account *server.Account
	owner   string // secret of the owner's own connection
}

var _ server.Authentication = (*doorman)(nil)

func newDoorman() *doorman { return &doorman{owner: rand.Text()} }

// Check implements [server.Authentication].
func (d *doorman) Check(c server.ClientAuthentication) bool {
	from := c.RemoteAddress()
	if c.Kind() != server.CLIENT || from == nil || from.Network() != "pipe" {
		return false
	}
	shown := c.GetOpts().Token
	if shown != "" && subtle.ConstantTimeCompare([]byte(shown), []byte(d.owner)) == 1 {
		c.RegisterUser(&server.User{Username: "owner", Account: d.account})
		return true
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
