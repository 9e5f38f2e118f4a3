package launch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
)

var hangsUp = workerRole("hangs up", func(ctx context.Context, c *client.Client) error {
	if _, err := c.Save(ctx, 1, state(1, 0, 1), client.SaveOptions{}); err != nil {
		return err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", os.Getenv(client.EnvSocket))
	if err != nil {
		return err
	}
	body := `{"step":2,"name":"left","items":[{"fqn":"x","value":true,"bytes":1}]}`
	_, err = fmt.Fprintf(conn, "POST /v1/save HTTP/1.1\r\nHost: trainer\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", os.Getenv(client.EnvToken), len(body), body)
	select { // until it waits
	case <-time.After(shortly):
	case <-ctx.Done():
	}
	// After the beginning of a next request, the server reads no further. It does
	// not see the end before it has answered the first request.
	_, werr := conn.Write([]byte("P"))
	if err := errors.Join(err, werr, conn.Close()); err != nil {
		return err
	}
	emit("hung up")
	return save(ctx, c, 2)
})

// A free slot does not go to a save without a waiter, even if the trainer has not
// learned of that.
func TestHungUpSave(t *testing.T) {
	t.Parallel()
	duringWrite(t, hangsUp, "hung up")
}
