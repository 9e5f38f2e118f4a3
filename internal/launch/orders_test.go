package launch

import "testing"

// A request that comes while one with Last becomes void is obeyed.
func TestVoidLeavesLaterOrder(t *testing.T) {
	t.Parallel()
	o := newOrders()
	o.give(StopRequest{Preempt: true, Last: true, Reason: "all steps"})
	was, _ := o.given()
	o.give(StopRequest{Reason: "the user"})
	o.void(was)
	now, came := o.given()
	if now == nil || now.Reason != "the user" {
		t.Fatalf("the order is %+v", now)
	}
	o.void(now)
	if now, _ := o.given(); now != nil {
		t.Errorf("the order is %+v", now)
	}
	select {
	case <-came:
	default:
		t.Error("the end of an order wakes no waiter")
	}
}
