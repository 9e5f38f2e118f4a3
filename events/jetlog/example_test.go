package jetlog_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
)

// A subscriber that resumes after the last event it has handled. It reads the whole log
// and picks the events it needs, so a missing event cannot go unnoticed.
func ExampleLog_Read() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	log, done, err := exampleLog(ctx) // jetlog.Connect(ctx, jetlog.Options{URL: "nats://HOST:4222", Token: token})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer done()
	cursor, err := log.Cursor(ctx, "evaluate")
	if err != nil {
		fmt.Println(err)
		return
	}
	const end = 3 // 0 to continue forever
	for event, err := range log.Read(ctx, cursor.Sequence()+1, end) {
		if err != nil {
			fmt.Println(err)
			return
		}
		if event.Kind == "report.metrics" && event.Scope.Run == "mnist" {
			fmt.Println(event.Sequence, event.Kind, string(event.Data))
		}
		if err := cursor.Move(ctx, event.Sequence); err != nil { // or every so often
			fmt.Println(err)
			return
		}
	}
	fmt.Println("handled up to", cursor.Sequence())
	// Output:
	// 2 report.metrics {"attempt":1,"iteration":1,"step":1,"metrics":{"loss":2.5},"time_this_iter_s":0}
	// 3 report.metrics {"attempt":1,"iteration":2,"step":2,"metrics":{"loss":1.5},"time_this_iter_s":0}
	// handled up to 3
}

// exampleLog returns a log with two reports, on an embedded server.
func exampleLog(ctx context.Context) (*jetlog.Log, func(), error) {
	dir, err := os.MkdirTemp("", "example-*")
	if err != nil {
		return nil, nil, err
	}
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: dir})
	if err != nil {
		return nil, nil, err
	}
	log, err := jetlog.Connect(ctx, jetlog.Options{Dial: func(context.Context) (net.Conn, error) { return server.Dial() }})
	if err != nil {
		return nil, nil, err
	}
	stamp := func(id string) events.Stamp { return events.Stamp{ID: id, Source: "example", Time: time.Now()} }
	created, err := events.NewDecision(stamp("1"), events.Aggregate{}, events.StoreCreated{Store: "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5", Format: 1, Data: "data"})
	if err == nil {
		err = log.Create(ctx, created)
	}
	for i := 1; i <= 2 && err == nil; i++ {
		var report events.Fact
		report, err = events.NewFact(stamp(fmt.Sprint("report-", i)), events.Scope{Run: "mnist", Trial: "main", Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i, Step: int64(i), Metrics: map[string]any{"loss": 3.5 - float64(i)}})
		if err == nil {
			_, err = log.Append(ctx, report)
		}
	}
	return log, func() { log.Close(); server.Shutdown(); _ = os.RemoveAll(dir) }, err
}
