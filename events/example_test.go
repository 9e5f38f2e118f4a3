package events_test

import (
	"fmt"

	"github.com/ckptstore/ckptstore/events"
)

// A message of any NATS client becomes an event by its subject, headers and body.
func ExampleDecode() {
	e, err := events.Decode(events.Message{
		Subject: "ckpt.mnist.main.s.checkpoint.committed",
		Header: map[string][]string{
			"ce-id":              {"0192f0c1-2a3b-7c4d-8e5f-60718293a4b5"},
			"ce-type":            {"ckpt.checkpoint.committed.v1"},
			"ce-source":          {"trainer/0192f0c1-0000-7000-8000-000000000001"},
			"ce-time":            {"2026-03-14T15:09:26.5Z"},
			"ce-specversion":     {"1.0"},
			"ce-datacontenttype": {"application/json"},
		},
		Data: []byte(`{"attempt":2,"checkpoint":"step-200.a2","manifest":"3d…","bytes":4096}`),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	body, err := e.Body()
	if err != nil {
		fmt.Println(err) // of a newer version: stop here, or the event is lost
		return
	}
	switch b := body.(type) {
	case *events.CheckpointCommitted:
		fmt.Printf("evaluate %s@%s, %d bytes\n", e.Scope.Run, b.Checkpoint, b.Bytes)
	default: // ignore every other kind
	}
	// Output: evaluate mnist@step-200.a2, 4096 bytes
}
