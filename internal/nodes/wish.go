package nodes

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
)

// wishName names the file of the newest wish, which no job and no invitation has.
const wishName = "wish"

// wish is DIR/wish.json: a process needs what a process of another machine owns, and asks
// for it. The directory is all that both know of each other.
type wish struct {
	ID   string `json:"id"`   // distinguishes wishes
	Host string `json:"host"` // of the process, for people
}

// Wish asks the process that owns what a directory belongs to, to give it up when idle. It
// replaces earlier wishes.
func Wish(dir, host string) error {
	if err := writeSecret(dir, wishName, wish{rand.Text(), host}); err != nil {
		return fmt.Errorf("ask the process on another machine: %w", err)
	}
	return nil
}

// Wished returns what distinguishes the newest wish of a directory from earlier ones, and the
// host that has it; empty without one. dir is below a directory that exists.
func Wished(dir string) (id, host string) {
	if !Listed(dir) || !Listed(credentialsPath(dir, wishName)) {
		return "", ""
	}
	var w wish
	data, err := readSecret(dir, wishName)
	if err != nil || json.Unmarshal(data, &w) != nil {
		return "", "" // it is being replaced, or another user's
	}
	return w.ID, w.Host
}
